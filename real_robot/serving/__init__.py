"""A policy server and its gateway."""
