"""Loading and checking of recipes."""
