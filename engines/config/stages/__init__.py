"""The configuration of each stage, declared once."""
