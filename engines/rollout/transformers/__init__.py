"""The rollout engine transformers: the one of our own, for any transformers causal LM."""
