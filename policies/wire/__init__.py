"""What policy servers speak: messages, connections, schemas."""
