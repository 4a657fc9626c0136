"""Where a stage's work and its results live: artifacts, commit records, the work of attempts."""
