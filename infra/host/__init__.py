"""Processes, ports and records of this machine."""
