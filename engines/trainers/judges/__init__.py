"""Models that judge answers before the reward function is called."""
