"""Algorithms: advantages, policy losses, KL, aggregation; each a registered pure function."""
