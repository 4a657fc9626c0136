"""The data plane: models, training, rollout, rewards, and the jobs that combine them."""
