"""Policies as bundles that run without torch."""
