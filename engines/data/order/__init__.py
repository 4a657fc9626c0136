"""The order in which a stage visits its rows."""
