"""BaseEngine: one training API whatever the backend.

What lives here, once: micro-batching by token budget, gradient accumulation, global-count
normalisation and the backend's data-parallel factor, the non-finite guard, the schedule,
offload scopes, metrics. What a backend brings: build and shard the model, one forward,
clip-and-step, gather a parameter, its state dict.

The loss contract: a loss function returns a sum divided by a *global* count (`LossOutput`).
The result therefore does not depend on micro-batching, packing or data-parallel size; a test
permutes the splits for every backend and every loss.
"""
