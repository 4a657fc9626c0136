"""Files of a policy and of a critic: where they come from and where they go."""
