"""One RL step for the contract of advantage estimators: what a row declares, and no more."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.algorithms.advantage import advantages
from engines.algorithms.parts import Advantages
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rows import ADVANTAGES
from engines.types import TokenBatch

MASKS = [
    [0, 1, 1], [0, 1, 0, 0, 1], [0, 1, 1, 1], [0, 1], [0, 1, 1, 0, 1, 1], [0, 0, 1],
]  # fmt: skip
"""Prompts, and tokens of tools between the trained ones."""
GROUP_B = torch.tensor([0, 0, 1, 1, 1, 0])
SCORES_B = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
BETWEEN_GROUPS_B = torch.tensor([3.0, 3.0, -1.0, -1.0, -1.0, 3.0], dtype=torch.float64)
"""Equal within each group, different between them."""
_CHOSEN, _SQUARES = "old_logprobs", "sum_pi_squared"


def bare_step(masks: Sequence[Sequence[int]] = MASKS) -> TokenBatch:
    """Without any column but the mask."""
    return TokenBatch.from_sequences(
        [[1] * len(mask) for mask in masks],
        loss_mask=[[float(trained) for trained in mask] for mask in masks],
    )


def step_of(name: str, masks: Sequence[Sequence[int]] = MASKS) -> TokenBatch:
    """With random numbers in all columns and rows that the estimator declares, and in no other.

    Args:
        name: of the estimator.
        masks: 1 for each trained token of each sequence.

    Returns:
        Log-probabilities are below 0, sums of squares are possible ones, a name that this module
        does not know has numbers between 0 and 1.
    """
    row, bare = ADVANTAGES.find(name), bare_step(masks)
    generator = torch.Generator().manual_seed(1)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    logprobs_T = -uniform(bare.num_tokens) - 0.1
    rest_T = 1 - logprobs_T.exp()
    known = {
        _CHOSEN: logprobs_T,
        _SQUARES: logprobs_T.exp().square() + uniform(bare.num_tokens) * rest_T.square(),
        "ref_logprobs": -uniform(bare.num_tokens) - 0.1,
        "rollout_logprobs": -uniform(bare.num_tokens) - 0.1,
        "uniform": uniform(bare.num_tokens).double(),
        "values": 4 * uniform(bare.num_tokens) - 2,
        "last_values": 4 * uniform(bare.num_sequences) - 2,
    }
    columns = {each: known.get(each, uniform(bare.num_tokens)) for each in row.columns}
    rows = {each: known.get(each, uniform(bare.num_sequences)) for each in row.rows}
    return bare.with_columns(**columns).with_rows(**rows)


def estimate_step(
    name: str, batch: TokenBatch, scores_B: Tensor, group_B: Tensor, truncated_B: Tensor
) -> Advantages:
    """Of outcome rewards."""
    algorithm = AlgorithmConfig(adv_estimator=name)
    check_parts(algorithm)
    rewards_T = on_last_token(scores_B, batch.columns["loss_mask"] > 0, batch)
    return advantages(algorithm, batch, rewards_T, group_B, truncated_B=truncated_B)


def estimated(
    name: str,
    scores_B: Tensor = SCORES_B,
    order: Sequence[int] = range(len(MASKS)),
    batch: TokenBatch | None = None,
) -> Tensor:
    """(T,) advantages of the step, computed with its samples in some order.

    Args:
        name: of the estimator.
        scores_B: of the samples; every other one was cut at the length limit.
        order: in which the estimator sees them.
        batch: another than `step_of` of the name, of the same masks.

    Returns:
        In the order of `MASKS`, whatever `order` is.
    """
    whole, chosen = batch or step_of(name), torch.tensor(list(order))
    found = estimate_step(
        name, whole.select(order), scores_B[chosen], GROUP_B[chosen], chosen % 2 == 1
    )
    back_T = torch.empty_like(found.advantages_T)
    back_T[whole.token_index_T(order)] = found.advantages_T
    return back_T
