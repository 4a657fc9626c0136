"""What stands between a step that went wrong and the run."""
