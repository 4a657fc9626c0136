"""Inputs and outputs of the parts of an algorithm, and their lookup by name.

A part is a pure function; its row in `engines.config.rows` holds its paper, the columns that it
reads and the schema of its options.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from engines.algorithms.sequences import sum_by_sequence
from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.options import own_options
from engines.config.rows import AlgorithmRow
from engines.types import GlobalCounts, TokenBatch
from infra.plugins import PluginTable, load_row

Options = TypeVar("Options", bound=StrictModel)


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: the packed samples of one RL step.

    Attributes:
        batch: has the columns `loss_mask` (1 on sampled tokens) and those in the estimator's row.
        rewards_T: (T,) float64 finite, 0 on tokens that are not trained on. The outcome of a sample
            is on its last trained token; per-token rewards, such as a KL, are on theirs.
        scores_BR: (B, R) float64 finite, components of each sample's score.
        group_B: (B,) int64 in [0, num_groups), index of each sample's prompt.
        num_groups: number of prompts; a group may lack samples, or have none.
        truncated_B: (B,) bool, cut at the length limit.
    """

    batch: TokenBatch
    rewards_T: Tensor
    scores_BR: Tensor
    group_B: Tensor
    num_groups: int
    truncated_B: Tensor
    components: tuple[str, ...]
    algorithm: AlgorithmConfig
    options: StrictModel

    @property
    def mask_T(self) -> Tensor:
        """(T,) bool: tokens that are trained on."""
        return self.batch.columns["loss_mask"] > 0

    @property
    def outcomes_B(self) -> Tensor:
        """(B,) float64: total reward of each sample."""
        return sum_by_sequence(self.rewards_T, self.batch)


@dataclass(frozen=True)
class Advantages:
    """Result of an advantage estimator.

    Attributes:
        advantages_T: (T,) float32; 0 on tokens that are not trained on.
        returns_T: (T,) float32 targets of a critic; None if the estimator has no critic.
        kept_B: (B,) bool, samples that are trained on, from an estimator with `selects` in its
            row; the others have advantage 0 and cost no update. None: all.
    """

    advantages_T: Tensor
    returns_T: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept_B: Tensor | None = None

    @staticmethod
    def of_samples(values_B: Tensor, batch: TokenBatch) -> "Advantages":
        """Return advantages that give each sample's value to all of its trained tokens."""
        values_T = values_B.to(torch.float32)[batch.sequence_index_T]
        return Advantages(values_T * batch.columns["loss_mask"])


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss; tensors are (T,) float32, and only `logprobs_T` has a gradient.

    Attributes:
        old_logprobs_T: logprobs under the policy before the update.
        mask_T: bool, tokens that are trained on; losses elsewhere are ignored.
        counts: totals of the whole step, with the extras of the loss's own pre-pass.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    batch: TokenBatch
    counts: GlobalCounts
    algorithm: AlgorithmConfig
    options: StrictModel


@dataclass(frozen=True)
class TokenLoss:
    """Result of a policy loss.

    Attributes:
        loss_T: (T,) with gradient, before aggregation. A loss of whole sequences is repeated on
            their tokens, and its row fixes `seq-mean-token-mean`.
        token_metrics: (T,) values by name; their mean over the step's trained tokens is reported.
    """

    loss_T: Tensor
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)


def check_batch(
    part: str, batch: TokenBatch, columns: Iterable[str], rows: Iterable[str] = ()
) -> None:
    """Check that a batch has the columns (per token) and rows (per sequence) that a part reads.

    Raises:
        ValueError: names what is missing, and what there is.
    """
    for what, needed, there in (("columns", columns, batch.columns), ("rows", rows, batch.rows)):
        missing = sorted({*needed} - there.keys())
        if missing:
            raise ValueError(f"{part} needs the {what} {missing}; the batch has {sorted(there)}")


Gather = Callable[[Tensor], Tensor]
"""Concatenates the (N,) tensors of all ranks, in float64."""


@dataclass(frozen=True)
class PrepassInputs:
    """Inputs of a loss's pre-pass (`AlgorithmRow.prepass`) on one rank, before the step is cut.

    The pre-pass returns named numbers of the whole step, equal on every rank, which the loss finds
    in `counts.extras`. Statistics of a micro-batch would depend on how the step is cut. Logprobs
    are `old_logprobs`; a rank may have no trained tokens.
    """

    batch: TokenBatch
    mask_T: Tensor
    gather: Gather
    options: StrictModel


@dataclass(frozen=True)
class Part:
    """A part that was looked up; `prepass` is None for a part without a pre-pass."""

    row: AlgorithmRow
    function: Callable[..., Any]
    prepass: Callable[[PrepassInputs], Mapping[str, float]] | None = None

    def options(self, algorithm: AlgorithmConfig) -> StrictModel:
        """Return the part's share of `algorithm.options`, validated."""
        return own_options(algorithm.options, self.row, "rl.algorithm.options")


def options_as(schema: type[Options], options: StrictModel) -> Options:
    """Return the options; TypeError if they are not of the schema that the part expects."""
    if not isinstance(options, schema):
        raise TypeError(f"options are {type(options).__name__}; need {schema.__name__}")
    return options


@cache
def find_part(table: PluginTable[AlgorithmRow], name: str) -> Part:
    """Return a part by its name; raises as `PluginTable.find` and `load_row` do."""
    row = table.find(name)
    return Part(
        row,
        load_row(row, table.setting),
        load_row(replace(row, target=row.prepass), table.setting) if row.prepass else None,
    )
