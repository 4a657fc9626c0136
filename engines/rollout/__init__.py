"""Rollout: prompts in as token ids, sampled completions out; one contract, several engines."""
