"""Resources of a pipeline run."""
