"""`burnish doctor policy.path=...`."""
