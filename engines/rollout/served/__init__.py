"""Shared parts of rollout engines whose library samples in processes of its own."""
