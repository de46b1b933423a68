"""Policies with a likelihood, made of policies without one: what the on-policy methods train."""
