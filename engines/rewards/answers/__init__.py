"""Extraction and normalisation of the final answer of a completion."""
