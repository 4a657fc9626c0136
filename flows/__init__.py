"""What happens, in order: the pipeline, its recipe, and the command line."""
