"""The forward pass that the backends share: attention, log-probabilities, memory."""
