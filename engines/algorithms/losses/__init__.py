"""Policy losses: one pure function each."""
