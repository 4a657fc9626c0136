"""The base layer: storage, job execution, tracking and naming. It contains no training code."""
