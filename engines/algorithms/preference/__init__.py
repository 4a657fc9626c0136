"""Losses of preference training: pairs, single answers, and the scores of a reward model."""
