"""Checkpoints: sharded state, the store of step checkpoints, export to Hugging Face."""
