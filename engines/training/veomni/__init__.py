"""The VeOmni backend."""
