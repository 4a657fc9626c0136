"""The ranks and rollout engines of a trainer: placed, started and called."""
