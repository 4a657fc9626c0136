"""Whole models, as Hugging Face directories."""
