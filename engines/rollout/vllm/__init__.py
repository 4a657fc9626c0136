"""The rollout engine vllm; the only package that imports vLLM."""
