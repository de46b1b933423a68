"""Folders of runs: checkpoints, manifests, resuming, tracking."""
