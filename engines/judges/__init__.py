"""Models and rewards that judge answers."""
