"""Rewards of how an answer is written, whatever it says."""
