"""Measure a policy or a model on held-out rows."""
