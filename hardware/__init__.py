"""Platforms: the only code that knows differences between kinds of devices."""
