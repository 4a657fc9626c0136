"""Losses that learn a teacher's distributions."""
