"""Rules among settings, each written once: the recipe asks them early, the job asks them last.

Promises: every rule names the setting as a recipe has it, what it got, what it needs and what to
do. Does not promise: anything about data, models or devices.
"""
