"""lm-evaluation-harness with a model of ours; imported in its own job environment alone."""
