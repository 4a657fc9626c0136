"""Checks that stop a run or leave out an update when a step went wrong."""
