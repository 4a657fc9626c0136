"""Rollout: prompts as token ids in, sampled completions out; one interface, several engines."""
