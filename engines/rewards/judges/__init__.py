"""Rewards that say what a model said of the answer before they were asked."""
