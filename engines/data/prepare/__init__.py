"""Make the rows of a dataset from raw data: sources, preprocessors, generated problems."""
