"""The vocabulary everyone may import: no simulator, no algorithm."""
