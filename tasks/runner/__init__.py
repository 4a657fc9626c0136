"""Brings a stage to its result."""
