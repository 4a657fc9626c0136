"""The cases of `trl_numbers.py`: inputs as plain numbers, and TRL's settings."""

import random

import torch

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
KL = {"beta": 0.3, "use_bias_correction_kl": False}

LOSSES = {
    "grpo_clip": ("grpo", "apart", {"loss_type": "grpo", **CLIP}),
    "grpo_delta": ("grpo", "apart", {"loss_type": "grpo", "delta": 3.0, **CLIP}),
    "grpo_kl": ("grpo", "apart", {"loss_type": "grpo", **KL, **CLIP}),
    "grpo_on_policy": ("grpo", "on_policy", {"loss_type": "grpo", **KL}),
    "grpo_corrected_kl": ("grpo", "on_policy", {"loss_type": "grpo", "beta": 0.3}),
    "grpo_one_untrained": ("grpo", "one_untrained", {"loss_type": "grpo", **CLIP}),
    "grpo_in_two": ("grpo", "apart", {"loss_type": "grpo", **KL, **CLIP}, 2),
    "bnpo": ("grpo", "apart", {"loss_type": "bnpo", **CLIP}),
    "bnpo_entropy": ("grpo", "apart", {"loss_type": "bnpo", "entropy_coef": 0.05, **CLIP}),
    "dr_grpo": ("grpo", "apart", {"loss_type": "dr_grpo", **KL, **CLIP}),
    "dapo": ("grpo", "apart", {"loss_type": "dapo", **CLIP}),
    "dapo_in_two": ("grpo", "apart", {"loss_type": "dapo", **KL, **CLIP}, 2),
    "luspo_token": ("grpo", "apart", {"loss_type": "luspo", **CLIP}),
    "luspo_sequence": (
        "grpo", "close", {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIP},
    ),
    "gspo": (
        "grpo", "close", {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIP},
    ),
    "gspo_kl": (
        "grpo", "close",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **KL, **CLIP},
    ),
    "cispo": ("grpo", "apart", {"loss_type": "cispo", "epsilon_high": 1.25}),
    "sapo": (
        "grpo", "apart",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    "gmpo": ("gmpo", "apart", {"epsilon": 0.4, "epsilon_high": 0.3}),
    "gmpo_kl": ("gmpo", "apart", {"epsilon": 0.4, "epsilon_high": 0.3, **KL}),
    "rloo_on_policy": ("rloo", "on_policy", {"beta": 0.0}),
    "rloo_single": ("rloo", "single", {"beta": 0.0, **CLIP}),
}  # fmt: skip
"""Trainer, inputs, settings and, if not one, the number of micro-batches."""

EIGHTHS = [
    [0.875, 0.25, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [-1.5, 0.125, 2.0, 0.125],
    [0.0, 0.0, 0.0, 1.0],
]  # fmt: skip
PARTLY = [[0.875, None, 0.0, 1.0], [0.5, 0.5, None, 0.5], [None, None, 2.0, None], [0, 0, 0, 1]]
SECOND = [[10.0, 20.0, 0.0, 50.0], [0.0, 5.0, 5.0, 0.0], [3.0, 3.0, 3.0, 3.0], [7.0, 1.0, 2.0, 9.0]]
ADVANTAGES = {
    "grpo_group": ("grpo", [EIGHTHS], {"scale_rewards": "group"}),
    "grpo_none": ("grpo", [EIGHTHS], {"scale_rewards": "none"}),
    "grpo_batch": ("grpo", [EIGHTHS], {"scale_rewards": "batch"}),
    "grpo_unscored": ("grpo", [PARTLY], {"scale_rewards": "group"}),
    "grpo_weighted": ("grpo", [EIGHTHS, SECOND], {"reward_weights": [1.0, 0.25]}),
    "gdpo": (
        "grpo", [EIGHTHS, SECOND],
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    ),
    "rloo": ("rloo", [EIGHTHS], {"beta": 0.0}),
    "rloo_unscored": ("rloo", [PARTLY], {"beta": 0.0}),
    "rloo_normalized": ("rloo", [EIGHTHS], {"beta": 0.0, "normalize_advantages": True}),
    "rloo_kl": ("rloo", [EIGHTHS], {"beta": 0.25}),
}  # fmt: skip
"""Trainer, rewards by function, group and answer, and settings."""


PROMPTS = [
    ([2, 5, 9], [3, 7, 7, 1]), ([4], [11, 2]), ([8, 8], [1]), ([15, 3, 10, 6], [12, 14, 5, 2, 9]),
]  # fmt: skip
"""Token ids of prompts, and of their answers."""


def make_step(seed, far, lengths=(1, 4, 6, 3, 5, 2, 7, 4), masks=None):
    """Answers of uneven lengths, holes in some, and log-ratios drawn from `far`."""
    source = random.Random(seed)

    def numbers(low, high):
        return [[round(source.uniform(low, high), 4) for _ in range(n)] for n in lengths]

    old = numbers(-3.0, -0.2)
    return {
        "mask": masks or [[int(i % 3 != 1 or n < 4) for i in range(n)] for n in lengths],
        "old_logprobs": old,
        "logprobs": [[round(x + source.choice(far), 4) for x in answer] for answer in old],
        "ref_logprobs": [[round(x + source.uniform(-0.8, 0.8), 4) for x in row] for row in old],
        "entropy": numbers(0.1, 2.0),
        "advantages": [round(source.gauss(0, 1.5), 4) for _ in lengths],
    }


def make_steps():
    """Inputs of losses by name."""
    masks = [[1], [1, 0, 1, 1], [0, 0, 0], [1, 1], [0, 1], [1, 1, 1]]
    lengths = [len(mask) for mask in masks]
    return {
        "apart": make_step(1, [-0.9, -0.3, -0.1, 0.05, 0.15, 0.4, 1.3]),
        "close": make_step(2, [-0.5, -0.1, 0.05, 0.2, 0.5]),
        "on_policy": make_step(3, [0.0]),
        "one_untrained": make_step(4, [-0.9, -0.3, 0.05, 0.4], lengths, masks),
        "single": make_step(
            5, [-0.9, -0.1, 0.1, 0.4, 0.6], [1, 2, 3, 1, 2, 3], [[1], [0, 1], [0, 1, 0]] * 2
        ),
    }


def fill(model: torch.nn.Module) -> None:
    """Give a model weights that no random number decides: a sine, around 1 for those of norms."""
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(model.named_parameters())):
            place = torch.arange(weight.numel(), dtype=torch.float64)
            wave = 0.4 * torch.sin(1.7 * place + number)
            weight.copy_(wave.view_as(weight) + (weight.dim() == 1))
