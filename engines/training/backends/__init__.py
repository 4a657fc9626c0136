"""The training backends, one room each."""
