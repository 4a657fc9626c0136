"""Rewards that use a score or text that a model produced before they are called."""
