"""Computes what identifies a stage: its fingerprint and the digests of its code."""
