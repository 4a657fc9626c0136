"""Nightly reproduction: measurements, verdicts and pages."""
