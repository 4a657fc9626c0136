"""Runs single stages: requests, jobs and results."""
