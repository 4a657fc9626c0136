"""A run in this process, watched from a terminal."""
