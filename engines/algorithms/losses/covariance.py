"""Policy losses that restrain the tokens which drive the entropy down (arXiv:2505.22617).

The entropy falls by the covariance of log-probability and advantage; a few tokens carry most of it.
``cov_t = (A_t - mean A) (log pi_t - mean log pi)``, means over the trained tokens of the step.
Promises: means, thresholds and draws are of the whole step, computed before it is cut. Departure:
log pi is that of `old_logprobs`, before the step's first update; the paper's changes with updates.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.algorithms.losses.ppo_clip import clip_range, probability_ratio
from engines.algorithms.options import ClipCovOptions, KlCovOptions
from engines.algorithms.parts import PolicyLossInputs, PrepassInputs, TokenLoss, options_as

_ADVANTAGE, _LOGPROB = "cov_mean_advantage", "cov_mean_logprob"
_THRESHOLD, _SHARE = "cov_threshold", "cov_share_of_ties"


def clip_cov_prepass(inputs: PrepassInputs) -> Mapping[str, float]:
    """Return the means of advantage and log-probability, and the threshold of the draw.

    The loss takes a candidate token if its column `uniform`, (T,) float64 in [0, 1), is at most the
    threshold.
    """
    options = options_as(ClipCovOptions, inputs.options)
    num_tokens, means = _means(inputs)
    cov_T = _covariance_T(inputs.batch.columns, means)
    candidate_T = inputs.mask_T & (cov_T > options.clip_cov_lb) & (cov_T < options.clip_cov_ub)
    num_taken = int(options.clip_cov_ratio * num_tokens)
    own = inputs.batch.columns["uniform"].to(torch.float64)[candidate_T]
    found = inputs.gather(own.sort().values[:num_taken]).sort().values[:num_taken]
    threshold = float(found[-1]) if found.numel() else -1.0
    return {**means, _THRESHOLD: threshold}


def clip_cov_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """PPO-clip, without gradient on tokens drawn from those of large covariance (sec. 4.2).

    Of the tokens with `clip_cov_lb` < cov < `clip_cov_ub`, a number is drawn that is
    `clip_cov_ratio` of the step's tokens, rounded down. No dual clip.
    """
    options = options_as(ClipCovOptions, inputs.options)
    eps_low, eps_high = clip_range(inputs.algorithm)
    cov_T = _covariance_T(inputs.batch.columns, inputs.counts.extras)
    candidate_T = inputs.mask_T & (cov_T > options.clip_cov_lb) & (cov_T < options.clip_cov_ub)
    drawn_T = inputs.batch.columns["uniform"] <= inputs.counts.extras[_THRESHOLD]
    taken_T = candidate_T & drawn_T
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    plain_T = -inputs.advantages_T * ratio_T
    clipped_T = -inputs.advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(
        torch.where(taken_T, 0.0, torch.maximum(plain_T, clipped_T)),
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/cov_clipfrac": taken_T.to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def kl_cov_prepass(inputs: PrepassInputs) -> Mapping[str, float]:
    """Return means, the smallest covariance of a restrained token, and the share of tied tokens.

    The share is the part of the tokens with exactly that covariance for which there is room.
    """
    options = options_as(KlCovOptions, inputs.options)
    num_tokens, means = _means(inputs)
    num_taken = int(options.kl_cov_ratio * num_tokens)
    own = _covariance_T(inputs.batch.columns, means)[inputs.mask_T]
    largest = own.sort(descending=True).values[:num_taken]
    found = inputs.gather(largest).sort(descending=True).values[:num_taken]
    if not found.numel():
        return {**means, _THRESHOLD: torch.inf, _SHARE: 0.0}
    last = float(found[-1])
    num_ties = float(inputs.gather((own == last).sum().to(torch.float64).reshape(1)).sum())
    return {**means, _THRESHOLD: last, _SHARE: float((found == last).sum()) / num_ties}


def kl_cov_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """``-A r``, with a penalty on the tokens of the largest covariance (sec. 4.3).

    The `kl_cov_ratio` of the step's tokens with the largest covariance, rounded down, also pay
    ``ppo_kl_coef |log pi - log pi_old|``. Tokens that tie for the last places share them: certain
    tokens (log pi = 0) of equal advantage tie by the thousand. No clip.
    """
    options = options_as(KlCovOptions, inputs.options)
    extras = inputs.counts.extras
    cov_T = _covariance_T(inputs.batch.columns, extras)
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    above_T, ties_T = cov_T > extras[_THRESHOLD], cov_T == extras[_THRESHOLD]
    taken_T = above_T.to(ratio_T) + extras[_SHARE] * ties_T.to(ratio_T)
    distance_T = (inputs.logprobs_T - inputs.old_logprobs_T).abs()
    return TokenLoss(
        options.ppo_kl_coef * taken_T * distance_T - inputs.advantages_T * ratio_T,
        {
            "actor/cov_klfrac": taken_T,
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def _means(inputs: PrepassInputs) -> tuple[int, dict[str, float]]:
    """Return the number of trained tokens of the step, and their means."""
    columns, mask_T = inputs.batch.columns, inputs.mask_T
    own = [mask_T.sum().to(torch.float64)]
    for name in ("advantages", "old_logprobs"):
        own.append(columns[name][mask_T].to(torch.float64).sum())
    sums = inputs.gather(torch.stack(own)).reshape(-1, 3).sum(dim=0).tolist()
    num_tokens = max(1.0, sums[0])
    return int(sums[0]), {_ADVANTAGE: sums[1] / num_tokens, _LOGPROB: sums[2] / num_tokens}


def _covariance_T(columns: Mapping[str, Tensor], means: Mapping[str, float]) -> Tensor:
    """Return (T,) float64, so that a threshold selects the same tokens in every cut of the step."""
    advantages_T = columns["advantages"].to(torch.float64) - means[_ADVANTAGE]
    return advantages_T * (columns["old_logprobs"].to(torch.float64) - means[_LOGPROB])
