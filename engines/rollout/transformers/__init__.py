"""The project's own rollout engine, for any transformers causal LM."""
