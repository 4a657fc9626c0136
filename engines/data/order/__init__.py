"""In which order a stage visits its rows."""
