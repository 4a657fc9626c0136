"""Parts that all engines over a transformers module share."""
