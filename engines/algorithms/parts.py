"""What the parts of an algorithm read and return, and the parts that a configuration names.

A part is one pure function; its row in `engines.config.plugins` holds its paper, the columns it
reads and the schema of its options. Promises: a part is looked up by name once per process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from engines.algorithms.sequences import sum_by_sequence
from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.options import own_options
from engines.config.rows.algorithm import AlgorithmRow
from engines.types import GlobalCounts, TokenBatch
from infra.plugin_table import PluginTable
from infra.plugins import load_row

Options = TypeVar("Options", bound=StrictModel)


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator reads: the samples of one RL step, packed.

    Attributes:
        batch: with the column `loss_mask` (1 on sampled tokens), and the columns and rows that the
            estimator's row names.
        rewards_T: (T,) float64 finite, what each token earned: the outcome of a sample on its last
            trained token, and what is paid token by token, such as a KL in the reward, where it
            arises. 0 on tokens that are not trained on.
        scores_BR: (B, R) float64 finite: the components of each sample's score, in the order of
            `components`; one column where the reward gives one number.
        group_B: (B,) int64 in [0, num_groups): which prompt each sample answers.
        num_groups: number of prompts. A group may have lost samples, or all of them.
        truncated_B: (B,) bool: cut at the length limit, so that its end is no end of the task.
        components: names of the columns of `scores_BR`.
        algorithm: the configuration, for the switches that estimators share.
        options: the estimator's own validated options.
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
        """(B,) float64: all that each sample earned."""
        return sum_by_sequence(self.rewards_T, self.batch)


@dataclass(frozen=True)
class Advantages:
    """What an advantage estimator returns.

    Attributes:
        advantages_T: (T,) float32; 0 on tokens that are not trained on.
        returns_T: (T,) float32 targets of a critic; None where the estimator uses none.
        metrics: of the step, by name.
        kept_B: (B,) bool: samples that are trained on, of an estimator whose row says that it
            `selects`; the others have advantage 0 and cost no update. None: all.
    """

    advantages_T: Tensor
    returns_T: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept_B: Tensor | None = None

    @staticmethod
    def of_samples(values_B: Tensor, batch: TokenBatch) -> "Advantages":
        """One (B,) value per sample, on each of its trained tokens."""
        values_T = values_B.to(torch.float32)[batch.sequence_index_T]
        return Advantages(values_T * batch.columns["loss_mask"])


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss reads; all tensors (T,) float32, `logprobs_T` with gradient.

    Attributes:
        logprobs_T: of the policy being trained.
        old_logprobs_T: of the policy before the update, without gradient.
        advantages_T: the advantage of each token, without gradient.
        mask_T: bool, tokens that are trained on. Values elsewhere are ignored by the caller.
        batch: the packed batch, for losses that need sequences or columns of their own.
        counts: of the whole step, with the extras of the loss's own pre-pass.
        algorithm: the configuration, for the switches that losses share.
        options: the loss's own validated options.
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
    """What a policy loss returns.

    Attributes:
        loss_T: (T,) loss of each token, with gradient, before aggregation. A loss of whole
            sequences stands on each of their tokens, and its row fixes `seq-mean-token-mean`.
        token_metrics: per-token values by metric name, (T,) each, reported as their mean over
            the trained tokens of the whole step.
    """

    loss_T: Tensor
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)


Gather = Callable[[Tensor], Tensor]
"""Of this rank's (N,) numbers to all ranks', one behind the other, in float64."""


@dataclass(frozen=True)
class PrepassInputs:
    """What a loss reads before its step is cut: `AlgorithmRow.prepass`.

    A function of these returns numbers of the whole step by name, equal on every rank; the loss
    finds them in `counts.extras`. A statistic of a micro-batch in their place would depend on how
    the step was cut.

    Attributes:
        batch: this rank's share. Logprobs are those of `old_logprobs`, before the update.
        mask_T: (T,) bool, tokens that are trained on; a rank may have none.
        gather: puts the numbers of all ranks together.
        options: the loss's own validated options.
    """

    batch: TokenBatch
    mask_T: Tensor
    gather: Gather
    options: StrictModel


@dataclass(frozen=True)
class Part:
    """A part that was looked up.

    Attributes:
        row: its facts.
        function: of `AdvantageInputs` to `Advantages`; of `PolicyLossInputs` to a `TokenLoss`; or
            of the logprobs of policy and reference to a KL for each token.
        prepass: of `PrepassInputs` to extras; None where the part has none.
    """

    row: AlgorithmRow
    function: Callable[..., Any]
    prepass: Callable[[PrepassInputs], Mapping[str, float]] | None = None

    def options(self, algorithm: AlgorithmConfig) -> StrictModel:
        """The part's share of `algorithm.options`, validated."""
        return own_options(algorithm.options, self.row, "rl.algorithm.options")


def options_as(schema: type[Options], options: StrictModel) -> Options:
    """A part's options as the schema that its row names.

    Args:
        schema: of the part.
        options: what `Part.options` made.

    Returns:
        The same object.

    Raises:
        TypeError: the row names another schema.
    """
    if not isinstance(options, schema):
        raise TypeError(f"options are {type(options).__name__}; need {schema.__name__}")
    return options


@cache
def find_part(table: PluginTable[AlgorithmRow], name: str) -> Part:
    """A part by its name; raises as `PluginTable.find` and `load_row` do."""
    row = table.find(name)
    prepass = load_row(replace(row, target=row.prepass), table.setting) if row.prepass else None
    return Part(row, load_row(row, table.setting), prepass)
