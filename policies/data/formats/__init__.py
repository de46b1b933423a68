"""Readers of the formats in which others keep recordings, one in each file."""
