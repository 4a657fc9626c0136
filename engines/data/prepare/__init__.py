"""From raw data to the rows of a dataset: sources, preprocessors, generated problems."""
