"""Each stage, declared once."""
