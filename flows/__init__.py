"""The pipeline, its recipe, and the command line."""
