"""Losses over pairs of answers, for a policy (the DPO family) and for a reward model.

A policy's losses are pure functions from `PairInputs` to `PairLoss`. A reward model's score is the
output of a value model after the last token of a sequence, as the role `reward` reads it.

Promises: the mean over the pairs of the step for every number of ranks or micro-batches; metrics
add up likewise. Values and gradients are finite for finite log-probabilities. Pairs are
independent, so no loss depends on how a step is cut. Reference logprobs are a column and margins a
row, made beforehand.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engines.algorithms.parts import check_batch, options_as
from engines.algorithms.preference.answers import (
    CHOSEN,
    MARGIN,
    MASK,
    REFERENCE,
    Answers,
    PairLoss,
    Pairs,
    answers_of,
    pairs_of,
    share_of_pairs,
)
from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.options import (
    IpoOptions,
    KtoOptions,
    OrpoOptions,
    PairOptions,
    RewardModelOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.config.options import own_options
from engines.config.rows import PREFERENCE_LOSSES
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch
from infra.plugins import load_row

ODDS_BEND = 1e-4
"""Nats per token; odds are about 10,000 at a mean log-probability this close to 0."""


@dataclass(frozen=True)
class PairInputs:
    """Inputs of a loss over P pairs; log-ratios are log-probabilities if it uses no reference."""

    chosen: Answers
    rejected: Answers
    options: PairOptions


def sigmoid_loss(inputs: PairInputs) -> PairLoss:
    """DPO (arXiv:2305.18290 eq. 7): ``-log sigmoid(beta (h_w - h_l))``, h the log-ratios.

    With `label_smoothing` e it is conservative DPO (Mitchell, A note on DPO with noisy preferences,
    2023): ``-(1 - e) log sigmoid(m) - e log sigmoid(-m)``, least at a margin m = log((1 - e) / e).
    With `likelihood_coef` a it is RPO (arXiv:2404.19733 eq. 1), which adds ``- a l_w``, l_w the
    mean log-probability of the chosen answer's tokens. Rewards are beta h.
    """
    options = options_as(SigmoidOptions, inputs.options)
    chosen_P = options.beta * inputs.chosen.log_ratio_N
    rejected_P = options.beta * inputs.rejected.log_ratio_N
    margin_P, smoothing = chosen_P - rejected_P, options.label_smoothing
    loss_P = -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
    if options.likelihood_coef:
        loss_P = loss_P - options.likelihood_coef * inputs.chosen.mean_logprob_N
    return PairLoss(loss_P, chosen_P, rejected_P)


def ipo_loss(inputs: PairInputs) -> PairLoss:
    """IPO (arXiv:2310.12036 eq. 17): ``(h_w - h_l - 1 / (2 beta))^2``; rewards are beta h.

    h is a mean over an answer's tokens. The paper writes the log-ratio of the whole answer; TRL
    uses the mean, after asking the paper's authors: a sum grows with the length, but the target
    margin is constant.
    """
    options = options_as(IpoOptions, inputs.options)
    chosen_P, rejected_P = inputs.chosen.mean_log_ratio_N, inputs.rejected.mean_log_ratio_N
    return PairLoss(
        (chosen_P - rejected_P - 1 / (2 * options.beta)).square(),
        options.beta * chosen_P,
        options.beta * rejected_P,
    )


def simpo_loss(inputs: PairInputs) -> PairLoss:
    """SimPO (arXiv:2405.14734 eq. 6): ``-log sigmoid(beta (l_w - l_l) - gamma)``.

    l is the mean log-probability of an answer's tokens; there is no reference. Rewards are beta l.
    """
    options = options_as(SimpoOptions, inputs.options)
    chosen_P = options.beta * inputs.chosen.mean_log_ratio_N
    rejected_P = options.beta * inputs.rejected.mean_log_ratio_N
    return PairLoss(-logsigmoid(chosen_P - rejected_P - options.gamma), chosen_P, rejected_P)


def orpo_loss(inputs: PairInputs) -> PairLoss:
    """ORPO (arXiv:2403.07691 eq. 6 and 7): ``-l_w - beta log sigmoid(log odds_w - log odds_l)``.

    l is the mean log-probability of an answer's tokens and ``odds = p / (1 - p)`` of p = exp(l),
    the geometric mean of their probabilities; there is no reference. The likelihood of the chosen
    answer is a mean over that answer, as in the paper; TRL's is over the tokens of a batch. Rewards
    are beta l.
    """
    options = options_as(OrpoOptions, inputs.options)
    chosen_P, rejected_P = inputs.chosen.mean_log_ratio_N, inputs.rejected.mean_log_ratio_N
    loss_P = -chosen_P - options.beta * logsigmoid(log_odds(chosen_P) - log_odds(rejected_P))
    return PairLoss(loss_P, options.beta * chosen_P, options.beta * rejected_P)


def log_odds(logprob_N: Tensor) -> Tensor:
    """Return (N,) log(p / (1 - p)) of p = exp(l).

    Closer to l = 0 than `ODDS_BEND` it continues as a line, since the odds of a certain answer are
    infinite. A clamp would remove the gradient of a rejected answer there.
    """
    near_N = logprob_N.clamp(max=-ODDS_BEND)
    slope = -1 / math.expm1(ODDS_BEND)
    return logprob_N - (near_N.expm1().neg().log() + slope * (logprob_N - near_N))


@dataclass(frozen=True)
class PairObjective:
    """A loss function over pairs: (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    `loss` is a module-level function, so that the object can be sent to other processes.
    """

    loss: Callable[[PairInputs], PairLoss]
    options: PairOptions

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Raises:
            ValueError: the batch lacks a column or the row `chosen`, or a unit is no pair.
        """
        return share_of_pairs("preference", *self.of_pairs(outputs, batch), counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and rewards of each pair; raises as `__call__`."""
        with_reference = self.options.needs_reference
        columns = [MASK, REFERENCE] if with_reference else [MASK]
        check_batch("a loss over pairs", batch, columns, [CHOSEN])
        pairs = pairs_of(batch)
        answers = answers_of(outputs.logprobs_T, batch, reference=with_reference)
        chosen, rejected = answers.take(pairs.chosen_P), answers.take(pairs.rejected_P)
        return self.loss(PairInputs(chosen, rejected, self.options)), pairs


def preference_objective(loss: str, options: Mapping[str, Any]) -> PairObjective | KtoObjective:
    """Return the loss of that name: over pairs, or over single answers.

    Raises:
        ConfigError: there is no such loss, or one of its options has a bad value.
        TypeError: its row names the schema of another kind of loss.
    """
    row = PREFERENCE_LOSSES.find(loss)
    own = own_options(options, row, "preference.options")
    function = load_row(row, PREFERENCE_LOSSES.setting)
    if row.paired:
        return PairObjective(function, options_as(PairOptions, own))
    return KtoObjective(options_as(KtoOptions, own), function)


BEHIND = Readouts(last_values=True)


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None, options: RewardModelOptions
) -> PairLoss:
    """Bradley-Terry: ``-log sigmoid(s_w - s_l - a m) + c (s_w + s_l)^2``; rewards are the scores.

    The first term is that of arXiv:2204.05862, with the margin m of Llama 2 (arXiv:2307.09288
    eq. 2); the second that of arXiv:2312.09244: a comparison does not determine a constant added to
    both scores. a is `margin_coef`, c is `center_coef`; `margin_P` None is 0.
    """
    gap_P = chosen_P - rejected_P
    if margin_P is not None:
        gap_P = gap_P - options.margin_coef * margin_P
    centre_P = options.center_coef * (chosen_P + rejected_P).square()
    return PairLoss(centre_P - logsigmoid(gap_P), chosen_P, rejected_P)


@dataclass(frozen=True)
class RewardModelObjective:
    """A reward model's loss function, with the call of `PairObjective`."""

    options: RewardModelOptions
    readouts: Readouts = BEHIND

    @property
    def required_rows(self) -> frozenset[str]:
        """Rows that the batch must have."""
        return frozenset({CHOSEN, MARGIN} if self.options.margin_coef else {CHOSEN})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Args:
            batch: whole pairs, as units with the `required_rows` (the chosen answer's margin
                counts). A pair counts if a token of either answer has loss mask 1.

        Raises:
            ValueError: the outputs are of a language model, the batch lacks something, or a unit
                is no pair.
        """
        return share_of_pairs("reward_model", *self.of_pairs(outputs, batch), counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and scores of each pair; raises as `__call__`."""
        if outputs.last_values_B is None:
            raise ValueError("a reward model's loss needs a value model and its last_values")
        check_batch("a loss over pairs", batch, [MASK], self.required_rows)
        pairs, scores_B = pairs_of(batch), outputs.last_values_B.to(torch.float64)
        found = bradley_terry_loss(
            scores_B[pairs.chosen_P],
            scores_B[pairs.rejected_P],
            batch.rows[MARGIN][pairs.chosen_P] if self.options.margin_coef else None,
            self.options,
        )
        return found, pairs
