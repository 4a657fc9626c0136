"""What a finished run shows: report, plots, page."""
