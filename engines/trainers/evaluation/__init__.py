"""Measuring a policy or a model on rows that it was not trained on."""
