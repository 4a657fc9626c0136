"""The floor that stores, runs, records and names things; knows nothing of training."""
