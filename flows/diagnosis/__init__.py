"""Diagnosis of a run, from the journals and commits of its stages."""
