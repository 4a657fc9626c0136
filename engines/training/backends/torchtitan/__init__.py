"""The training backend on TorchTitan."""
