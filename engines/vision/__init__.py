"""Images for vision models: patches, placeholder tokens, positions."""
