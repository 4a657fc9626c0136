"""Samples of an RL step for tests of algorithm parts: a prompt token, then what was sampled."""

from collections.abc import Sequence

from torch import Tensor

from engines.algorithms.advantage import advantages
from engines.algorithms.parts import Advantages
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.types import TokenBatch


def pack(lengths: Sequence[int]) -> TokenBatch:
    """Samples of so many sampled tokens, each behind a prompt of one."""
    return TokenBatch.from_sequences(
        [[1] * (1 + length) for length in lengths],
        loss_mask=[[0.0] + [1.0] * length for length in lengths],
    )


def estimate(
    algorithm: AlgorithmConfig,
    scores_B: Tensor,
    group_B: Tensor,
    lengths: Sequence[int] | None = None,
) -> Advantages:
    """Advantages of outcome rewards; samples of one token where no lengths are given."""
    batch = pack(lengths or [1] * scores_B.numel())
    mask_T = batch.columns["loss_mask"] > 0
    rewards_T = on_last_token(scores_B.double(), mask_T, batch)
    return advantages(algorithm, batch, rewards_T, group_B)


def estimate_B(algorithm: AlgorithmConfig, scores_B: Tensor, group_B: Tensor) -> Tensor:
    """(B,) advantages of samples of one token each."""
    return estimate(algorithm, scores_B, group_B).advantages_T[1::2]
