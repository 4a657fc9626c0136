"""Models that judge answers before a reward function does."""
