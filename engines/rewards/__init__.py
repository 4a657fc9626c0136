"""Rewards: the compute_score contract, built-in functions, and scoring under a deadline."""
