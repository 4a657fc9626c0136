"""The training backend on NeMo Automodel."""
