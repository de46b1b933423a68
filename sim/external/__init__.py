"""Worlds of other packages: Gymnasium environments in worker processes, here or in another Python."""
