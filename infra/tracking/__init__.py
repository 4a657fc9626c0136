"""Records what a run did in journals, and ships it to MLflow and other trackers."""
