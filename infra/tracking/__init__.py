"""What a run did, kept in journals and shipped to MLflow."""
