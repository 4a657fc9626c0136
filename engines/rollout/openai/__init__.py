"""OpenAI's API in front of a rollout engine, for agents and tools that support only that API."""
