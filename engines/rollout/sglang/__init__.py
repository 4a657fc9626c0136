"""The rollout engine sglang; the only package that imports SGLang."""
