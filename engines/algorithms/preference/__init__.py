"""Losses over preferences: pairs, answers by themselves, and the scores of a reward model."""
