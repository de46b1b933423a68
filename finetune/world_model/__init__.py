"""Learned models of worlds: ticks, an ensemble, the world that it imagines, and what there is to know about it."""
