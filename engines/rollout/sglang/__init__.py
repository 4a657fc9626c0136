"""The rollout engine sglang, and the only place where SGLang is imported."""
