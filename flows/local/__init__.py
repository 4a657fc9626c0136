"""Runs that a command shows on the terminal."""
