"""Configuration models of the data plane; imports without torch."""
