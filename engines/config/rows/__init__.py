"""Rows of built-in parts, where a kind has many."""
