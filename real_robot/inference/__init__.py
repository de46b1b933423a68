"""Policies beside the control loop: workers, chunks, real-time chunking."""
