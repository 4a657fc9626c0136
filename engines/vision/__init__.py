"""What a model that sees makes of images: patches, placeholder tokens, positions."""
