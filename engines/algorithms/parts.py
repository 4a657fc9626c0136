"""What the parts of an algorithm read and return, and the parts that a configuration names.

A part is one pure function; its row in `engines.config.plugins` holds its paper, the columns it
reads and the schema of its options. Promises: a part is looked up by name once per process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.options import own_options
from engines.config.plugins import AlgorithmRow
from engines.types import TokenBatch
from infra.plugin_table import PluginTable
from infra.plugins import load_row


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator reads.

    Attributes:
        scores_B: (B,) float64 finite scores of the samples.
        group_index_B: (B,) int64 in [0, num_groups): which prompt each sample answers.
        num_groups: number of prompts. A group may have lost samples, or all of them.
        algorithm: the configuration, for the switches that estimators share.
        options: the estimator's own validated options.
    """

    scores_B: Tensor
    group_index_B: Tensor
    num_groups: int
    algorithm: AlgorithmConfig
    options: StrictModel


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss reads; all tensors (T,) float32, `logprobs_T` with gradient.

    Attributes:
        logprobs_T: of the policy being trained.
        old_logprobs_T: of the policy before the update, without gradient.
        advantages_T: the advantage of each token, without gradient.
        mask_T: bool, tokens that are trained on. Values elsewhere are ignored by the caller.
        batch: the packed batch, for losses that need sequences or columns of their own.
        algorithm: the configuration, for the switches that losses share.
        options: the loss's own validated options.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    batch: TokenBatch
    algorithm: AlgorithmConfig
    options: StrictModel


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss returns.

    Attributes:
        loss_T: (T,) loss of each token, with gradient, before aggregation.
        token_metrics: per-token values by metric name, (T,) each, reported as their mean over
            the trained tokens of the whole step.
    """

    loss_T: Tensor
    token_metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """A part that was looked up.

    Attributes:
        row: its facts.
        function: of `AdvantageInputs` to advantages; of `PolicyLossInputs` to a `TokenLoss`; or
            of the logprobs of policy and reference to a KL for each token.
    """

    row: AlgorithmRow
    function: Callable[..., Any]

    def options(self, algorithm: AlgorithmConfig) -> StrictModel:
        """The part's share of `algorithm.options`, validated."""
        return own_options(algorithm.options, self.row, "rl.algorithm.options")


@cache
def find_part(table: PluginTable[AlgorithmRow], name: str) -> Part:
    """A part by its name; raises as `PluginTable.find` and `load_row` do."""
    row = table.find(name)
    return Part(row, load_row(row, table.setting))
