"""The loops: supervised fine-tuning, RL, evaluation."""
