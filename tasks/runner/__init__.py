"""How a stage comes to its result."""
