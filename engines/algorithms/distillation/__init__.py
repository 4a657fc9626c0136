"""A teacher's distributions as a loss."""
