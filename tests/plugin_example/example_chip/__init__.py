"""A plugin of the RLHF pipeline: a chip that is really the CPU, and a training engine for it."""
