"""The rollout engine vllm, and the only place where vLLM is imported."""
