"""Platforms: the code that knows the differences between vendors' devices."""
