"""Training loops (supervised, RL) and evaluation."""
