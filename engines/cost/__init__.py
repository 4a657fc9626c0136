"""Device memory and time of a run, from its recipe and a table of machines."""
