"""Report, plots and page of a finished run."""
