"""Rules between settings, each written once; checked early by the recipe and last by the job.

Promises: errors name the setting as in a recipe, and what is needed or what to do.
Does not promise: checks of data, models or devices.
"""
