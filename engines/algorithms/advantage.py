"""Compute advantages from rewards with the configured estimator.

Promises: one value per token, 0 on tokens that are not trained on; inputs are checked first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.algorithms.parts import AdvantageInputs, Advantages, check_batch, find_part
from engines.algorithms.sequences import sum_by_sequence
from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.rows import ADVANTAGES
from engines.errors import NonFiniteError
from engines.types import TokenBatch

SCORE = "score"
"""Name of the score itself among the components of a reward; by default the only one."""


def advantages(
    algorithm: AlgorithmConfig,
    batch: TokenBatch,
    rewards_T: Tensor,
    group_B: Tensor,
    *,
    scores_BR: Tensor | None = None,
    components: Sequence[str] = (SCORE,),
    truncated_B: Tensor | None = None,
    options: StrictModel | None = None,
) -> Advantages:
    """Return the advantages of the scored samples of one RL step.

    Args:
        rewards_T: (T,) reward of each token; see `AdvantageInputs`.
        group_B: (B,) int64 >= 0, index of each sample's prompt.
        scores_BR: (B, R) components of the scores; None: the sum of each sample's rewards.
        truncated_B: (B,) bool, samples cut at the length limit.
        options: the estimator's share of `algorithm.options`, validated; None validates it here.

    Raises:
        NonFiniteError: names the first sample whose reward or component is NaN or infinite.
        ValueError: shapes do not fit, an index is negative, or the batch lacks a column or row.
    """
    if rewards_T.shape != (batch.num_tokens,):
        raise ValueError(f"rewards {tuple(rewards_T.shape)}: need one per token")
    if group_B.shape != (batch.num_sequences,):
        raise ValueError(f"groups {tuple(group_B.shape)}: need one per sample")
    if group_B.numel() and int(group_B.min()) < 0:
        raise ValueError(f"group index {int(group_B.min())} is negative")
    rewards_T = rewards_T.to(torch.float64)
    outcomes_B = sum_by_sequence(rewards_T, batch)
    scores_BR = outcomes_B[:, None] if scores_BR is None else scores_BR.to(torch.float64)
    if scores_BR.shape != (batch.num_sequences, len(components)):
        raise ValueError(
            f"scores {tuple(scores_BR.shape)}: need one per sample and component, {components}"
        )
    if batch.num_sequences == 0:
        return Advantages(rewards_T.to(torch.float32))
    values_BR = torch.cat([outcomes_B[:, None], scores_BR], dim=1)
    for sample, component in (~torch.isfinite(values_BR)).nonzero().tolist():
        raise NonFiniteError(
            f"score of sample {sample} (group {int(group_B[sample])}) is "
            f"{float(values_BR[sample, component])}"
        )
    part = find_part(ADVANTAGES, algorithm.adv_estimator)
    check_batch(f"estimator {part.row.name}", batch, part.row.columns, part.row.rows)
    return part.function(
        AdvantageInputs(
            batch=batch,
            rewards_T=rewards_T,
            scores_BR=scores_BR,
            group_B=group_B.to(torch.int64),
            num_groups=int(group_B.max()) + 1,
            truncated_B=torch.zeros_like(group_B).bool() if truncated_B is None else truncated_B,
            components=tuple(components),
            algorithm=algorithm,
            options=part.options(algorithm) if options is None else options,
        )
    )
