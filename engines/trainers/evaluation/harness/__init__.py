"""lm-evaluation-harness with our models; imported only in its own job environment."""
