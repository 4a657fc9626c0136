"""What one step of a round consists of, a part each."""
