"""What a pipeline run stands on."""
