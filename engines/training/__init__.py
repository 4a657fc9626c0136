"""Training engines: one API, one implementation per backend."""
