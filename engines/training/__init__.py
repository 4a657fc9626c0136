"""Training engines: one contract, one implementation per backend."""
