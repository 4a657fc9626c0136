"""Parts of the forward pass that the backends share: attention, logprobs, memory."""
