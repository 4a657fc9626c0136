"""Rules between settings, each written once; checked early by the recipe and last by the job.

Promises: every error names the setting as in a recipe, the value, what is needed and what to do.
Does not promise: checks of data, models or devices.
"""
