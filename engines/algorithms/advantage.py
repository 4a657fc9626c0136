"""From scores to advantages, by the estimator that the configuration names.

Promises: one value per sample, in the order of the scores; scores are checked to be finite
first. Does not promise whitening across the batch: that belongs to an estimator.
"""

import torch
from torch import Tensor

from engines.algorithms.parts import AdvantageInputs, find_part
from engines.config.algorithm import AlgorithmConfig
from engines.config.plugins import ADVANTAGES
from engines.errors import NonFiniteError


def advantages(algorithm: AlgorithmConfig, scores_B: Tensor, group_index_B: Tensor) -> Tensor:
    """The advantage of each sample.

    Samples that could not be scored are left out by the caller, so groups may differ in size.

    Args:
        algorithm: names the estimator and its switches.
        scores_B: (B,) scores, any float type.
        group_index_B: (B,) int64 >= 0, which prompt each sample answers.

    Returns:
        (B,) float32, to be spread over the tokens of each sample.

    Raises:
        NonFiniteError: names the first sample whose score is NaN or infinite.
        UnknownPluginError: no such estimator.
        ValueError: the two tensors differ in shape, or an index is negative.
    """
    if scores_B.ndim != 1 or scores_B.shape != group_index_B.shape:
        raise ValueError(
            f"scores {tuple(scores_B.shape)} and groups {tuple(group_index_B.shape)} differ"
        )
    if scores_B.numel() == 0:
        return scores_B.to(torch.float32)
    if int(group_index_B.min()) < 0:
        raise ValueError(f"group index {int(group_index_B.min())} is negative")
    finite_B = torch.isfinite(scores_B)
    if not bool(finite_B.all()):
        first = int((~finite_B).nonzero()[0])
        group = int(group_index_B[first])
        raise NonFiniteError(f"score of sample {first} (group {group}) is {float(scores_B[first])}")
    part = find_part(ADVANTAGES, algorithm.adv_estimator)
    return part.function(
        AdvantageInputs(
            scores_B=scores_B.to(torch.float64),
            group_index_B=group_index_B.to(torch.int64),
            num_groups=int(group_index_B.max()) + 1,
            algorithm=algorithm,
            options=part.options(algorithm),
        )
    )
