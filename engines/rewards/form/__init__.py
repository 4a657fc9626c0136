"""Rewards of the form of an answer, independent of its content."""
