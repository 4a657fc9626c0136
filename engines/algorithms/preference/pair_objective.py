"""The loss function of preference training on pairs.

Promises: the mean over the pairs of the step for every number of ranks or micro-batches; metrics
add up likewise. Reference logprobs are a column made beforehand.

Losses over pairs of answers: pure functions of `PairInputs` to a `PairLoss`.

Promises: finite values and gradients for finite log-probabilities. Pairs are independent, so no
loss depends on how a step is cut.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from engines.algorithms.parts import options_as
from engines.algorithms.preference.answers import (
    CHOSEN,
    MASK,
    REFERENCE,
    Answers,
    PairLoss,
    Pairs,
    answers_of,
    check_batch,
    pairs_of,
    share_of_pairs,
)
from engines.algorithms.preference.options import (
    IpoOptions,
    OrpoOptions,
    PairOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

ODDS_BEND = 1e-4
"""Nats per token; odds are about 10,000 at a mean log-probability this close to 0."""


@dataclass(frozen=True)
class PairInputs:
    """What a loss over P pairs reads; log-ratios are log-probabilities if it uses no reference."""

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
    loss_P = (chosen_P - rejected_P - 1 / (2 * options.beta)).square()
    return PairLoss(loss_P, options.beta * chosen_P, options.beta * rejected_P)


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
    log_odds_ratio_P = log_odds(chosen_P) - log_odds(rejected_P)
    loss_P = -chosen_P - options.beta * logsigmoid(log_odds_ratio_P)
    return PairLoss(loss_P, options.beta * chosen_P, options.beta * rejected_P)


def log_odds(logprob_N: Tensor) -> Tensor:
    """Return (N,) log(p / (1 - p)) of p = exp(l).

    Closer to l = 0 than `ODDS_BEND` it continues as a line, since the odds of a certain answer are
    infinite. A clamp would remove the gradient of a rejected answer there.
    """
    near_N = logprob_N.clamp(max=-ODDS_BEND)
    slope = -1 / math.expm1(ODDS_BEND)
    log_one_minus_p_N = near_N.expm1().neg().log() + slope * (logprob_N - near_N)
    return logprob_N - log_one_minus_p_N


@dataclass(frozen=True)
class PairObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    `loss` is a function of a module, so that the object can be sent to other processes.
    """

    loss: Callable[[PairInputs], PairLoss]
    options: PairOptions

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that the batch must have."""
        return frozenset({MASK, REFERENCE} if self.options.needs_reference else {MASK})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Raises:
            ValueError: the batch lacks a column or the row `chosen`, or a unit is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("preference", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and rewards of each pair; raises as a call."""
        check_batch(batch, self.required_columns, [CHOSEN])
        pairs = pairs_of(batch)
        answers = answers_of(outputs.logprobs_T, batch, reference=self.options.needs_reference)
        chosen, rejected = answers.take(pairs.chosen_P), answers.take(pairs.rejected_P)
        return self.loss(PairInputs(chosen, rejected, self.options)), pairs
