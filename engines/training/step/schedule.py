"""The learning rate as a pure function of the optimizer step."""

import math

from engines.config.training import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate after `step` optimizer steps.

    The warm-up rises linearly and reaches `lr` at step `num_warmup_steps`; step 0 has
    `lr / (num_warmup_steps + 1)`. The cosine falls to `lr * min_lr_ratio` at `total_steps` (SGDR,
    arXiv:1608.03983 eq. 5) and stays there.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
