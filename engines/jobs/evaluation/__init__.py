"""What the job `evaluate` samples: the model, and its answers, which are kept."""
