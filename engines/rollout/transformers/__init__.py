"""The project's own rollout engine, for models of transformers."""
