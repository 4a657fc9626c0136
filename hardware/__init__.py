"""Every question about a device has one answer here: the platforms."""
