"""What every engine shares whose model is a transformers module."""
