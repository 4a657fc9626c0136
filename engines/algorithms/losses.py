"""Policy losses: one pure function each, from `PolicyLossInputs` to a `TokenLoss`.

Promises: a loss does not depend on how the step is cut into micro-batches. Means, thresholds and
draws of `clip_cov` and `kl_cov` are of the whole step, computed before it is cut.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.algorithms.options import ClipCovOptions, DroOptions, KlCovOptions, SapoOptions
from engines.algorithms.parts import PolicyLossInputs, PrepassInputs, TokenLoss, options_as
from engines.algorithms.sequences import mean_by_sequence
from engines.config.algorithm import AlgorithmConfig

LOG_RATIO_BOUND = 20.0
SEQUENCE_LOG_RATIO_BOUND = 10.0
_EPS = 1e-8
_ADVANTAGE, _LOGPROB = "cov_mean_advantage", "cov_mean_logprob"
_THRESHOLD, _SHARE = "cov_threshold", "cov_share_of_ties"


def clip_range(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Return (eps_low, eps_high): how far the ratio may leave 1 downwards and upwards."""
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    return (
        algorithm.clip_ratio if low is None else low,
        algorithm.clip_ratio if high is None else high,
    )


def probability_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return (T,) pi / pi_old with the log-ratio clamped to +-20, so that it is finite."""
    return (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_losses(inputs: PolicyLossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (T,) ``-A r`` and ``-A clip(r, 1 - eps_low, 1 + eps_high)``."""
    eps_low, eps_high = clip_range(inputs.algorithm)
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -inputs.advantages_T * ratio_T, -inputs.advantages_T * clipped_T


def ppo_clip_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """PPO-clip: ``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``.

    Where A < 0 the loss is at most ``-A c`` (dual clip), so that one token whose probability
    exploded cannot dominate the step. `pg_clipfrac` marks tokens whose gradient the clip removed,
    `pg_clipfrac_lower` where the dual clip removed it; `ppo_kl` is log pi_old - log pi.
    """
    plain_T, clipped_T = clipped_losses(
        inputs, probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    )
    upper_T = torch.maximum(plain_T, clipped_T)
    bound_T = -inputs.advantages_T * inputs.algorithm.clip_ratio_c
    negative_T = inputs.advantages_T < 0
    return TokenLoss(
        torch.where(negative_T, torch.minimum(upper_T, bound_T), upper_T),
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/pg_clipfrac_lower": (negative_T & (upper_T > bound_T)).to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def cispo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """CISPO (arXiv:2506.13585 eq. 4): REINFORCE weighted by a clipped, detached ratio.

    ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi``: every token keeps a gradient, also the
    rare ones that PPO-clip would drop. The paper leaves the lower side open (`clip_ratio_low` near
    1) and clips above. `actor/pg_clipfrac` marks tokens whose weight is clipped.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    ratio_T = probability_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T)
    weight_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(
        -weight_T * inputs.advantages_T * inputs.logprobs_T,
        {
            "actor/pg_clipfrac": (weight_T != ratio_T).to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def sapo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """SAPO (arXiv:2511.20347): a sigmoid gate instead of the clip.

    ``-A (4 / tau) sigmoid(tau (r - 1))``, with `tau_pos` where A > 0 and `tau_neg` elsewhere. At
    r = 1 its gradient is that of the ratio; it fades as the ratio leaves 1 on either side.
    """
    options = options_as(SapoOptions, inputs.options)
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    tau_T = torch.where(inputs.advantages_T > 0, options.tau_pos, options.tau_neg).to(ratio_T)
    return TokenLoss(
        -inputs.advantages_T * (torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T),
        {"actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach()},
    )


def reinforce_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """``-A log pi`` of each token: REINFORCE (Williams 1992), and GPG (arXiv:2504.02546 eq. 6).

    Without ratio and clip, so it is correct for one update of a batch that the policy sampled.
    """
    return TokenLoss(
        -inputs.advantages_T * inputs.logprobs_T,
        {"actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach()},
    )


def gspo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """GSPO (arXiv:2507.18071 eq. 5 and 11): PPO-clip on the geometric mean of an answer's ratios.

    ``s = exp(mean of log(pi / pi_old))``. As in GSPO-token, each token has the value of s and the
    gradient of its own log-probability: ``s_t = sg(s) pi_t / sg(pi_t)``, so that advantages may
    differ between the tokens of an answer. ``max(-A s, -A clip(s))``; log s is at most 10; no dual
    clip.
    """
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    mean_B = mean_by_sequence(log_ratio_T.detach(), inputs.mask_T, inputs.batch)
    own_T = inputs.logprobs_T - inputs.logprobs_T.detach()
    log_s_T = (mean_B[inputs.batch.sequence_index_T] + own_T).clamp(max=SEQUENCE_LOG_RATIO_BOUND)
    plain_T, clipped_T = clipped_losses(inputs, log_s_T.exp())
    return TokenLoss(
        torch.maximum(plain_T, clipped_T),
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/ppo_kl": -log_ratio_T.detach(),
        },
    )


def geo_mean_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """GMPO (arXiv:2507.20673 eq. 4): the geometric mean of an answer's clipped ratios.

    ``-A exp(mean of d)``, where d is a token's log-ratio, clamped on the side where the objective
    would gain: above eps_high if A > 0, below -eps_low if A < 0. The clip ratios are bounds of
    log-ratios here; the paper uses 0.4 for both. If the advantages of an answer differ, their mean
    is used. `actor/pg_clipfrac` marks clamped tokens.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    sign_T = inputs.advantages_T.sign()
    held_T = sign_T * torch.minimum(
        sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-eps_low, eps_high)
    )
    held_T = torch.where(sign_T == 0, log_ratio_T, held_T)
    mean_B = mean_by_sequence(held_T, inputs.mask_T, inputs.batch)
    ratio_B = mean_B.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    advantage_B = mean_by_sequence(inputs.advantages_T, inputs.mask_T, inputs.batch)
    return TokenLoss(
        (-advantage_B * ratio_B)[inputs.batch.sequence_index_T],
        {
            "actor/pg_clipfrac": (held_T != log_ratio_T).to(torch.float32),
            "actor/ppo_kl": -log_ratio_T.detach(),
        },
    )


def dppo_tv_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO-TV (arXiv:2602.04879): REINFORCE with a truncated ratio and a bound of probability.

    ``-A sg(min(r, c)) log pi``, without gradient where ``pi - pi_old > eps_high`` and A > 0, or
    ``pi - pi_old < -eps_low`` and A < 0: the total variation of choosing this token or not. Unlike
    a bound of the ratio, it lets a rare token multiply its probability and holds a frequent one.
    c is `clip_ratio_c`; `actor/pg_clipfrac` marks tokens outside the bound.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    moved_T = inputs.logprobs_T.detach().exp() - inputs.old_logprobs_T.exp()
    return _masked_reinforce(
        inputs, torch.where(inputs.advantages_T > 0, moved_T > eps_high, moved_T < -eps_low)
    )


def dppo_kl_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO-KL (arXiv:2602.04879): as `dppo_tv_loss`, bounded by the binary KL.

    ``KL = p_o log(p_o / p) + (1 - p_o) log((1 - p_o) / (1 - p))``, of choosing this token or not,
    from the old policy. A token is outside if it exceeds eps_high (A > 0) or eps_low (A < 0) and
    the gradient would lead further away.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    logprobs_T, old_T = inputs.logprobs_T.detach(), inputs.old_logprobs_T
    p_T, p_old_T = logprobs_T.exp(), old_T.exp()
    other_T = torch.log((1 - p_old_T + _EPS) / (1 - p_T + _EPS))
    kl_T = p_old_T * (old_T - logprobs_T) + (1 - p_old_T) * other_T
    up_T = inputs.advantages_T > 0
    leaves_T = torch.where(up_T, p_T > p_old_T, p_T < p_old_T)
    bound_T = torch.where(up_T, eps_high, eps_low).to(kl_T)
    return _masked_reinforce(inputs, leaves_T & (kl_T > bound_T))


def dro_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DRO (arXiv:2405.19107): a quadratic pull to the old policy.

    ``-(A log pi - beta / 2 (log pi - log pi_old)^2)``. Departures: per token, where the paper
    has whole answers, and with an advantage, where it learns a value.
    """
    options = options_as(DroOptions, inputs.options)
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    pull_T = 0.5 * options.dro_beta * log_ratio_T.square()
    return TokenLoss(
        pull_T - inputs.advantages_T * inputs.logprobs_T,
        {"actor/ppo_kl": -log_ratio_T.detach(), "actor/dro_pull": pull_T.detach()},
    )


def _masked_reinforce(inputs: PolicyLossInputs, outside_T: Tensor) -> TokenLoss:
    ratio_T = probability_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T)
    weight_T = ratio_T.clamp(max=inputs.algorithm.clip_ratio_c)
    loss_T = -inputs.advantages_T * weight_T * inputs.logprobs_T
    return TokenLoss(
        torch.where(outside_T, 0.0, loss_T),
        {
            "actor/pg_clipfrac": outside_T.to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def clip_cov_prepass(inputs: PrepassInputs) -> Mapping[str, float]:
    """Return the means of advantage and log-probability, and the threshold of the draw.

    The loss drops the gradient of a candidate token if its column `uniform`, (T,) float64 in
    [0, 1), is at most the threshold.
    """
    options = options_as(ClipCovOptions, inputs.options)
    num_tokens, means = _means(inputs)
    cov_T = _covariance_T(inputs.batch.columns, means)
    candidate_T = inputs.mask_T & (cov_T > options.clip_cov_lb) & (cov_T < options.clip_cov_ub)
    num_taken = int(options.clip_cov_ratio * num_tokens)
    own = inputs.batch.columns["uniform"].to(torch.float64)[candidate_T]
    found = inputs.gather(own.sort().values[:num_taken]).sort().values[:num_taken]
    return {**means, _THRESHOLD: float(found[-1]) if found.numel() else -1.0}


def clip_cov_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """PPO-clip, without gradient on tokens drawn from those of large covariance.

    arXiv:2505.22617 sec. 4.2: the entropy falls by the covariance of log-probability and advantage,
    ``cov_t = (A_t - mean A) (log pi_t - mean log pi)``, means over the trained tokens of the step;
    a few tokens carry most of it. Departure: log pi is that of `old_logprobs`, before the step's
    first update; the paper's changes with updates.

    `clip_cov_ratio` of the step's tokens, rounded down, are drawn from those with
    `clip_cov_lb` < cov < `clip_cov_ub`; if these are fewer, all of them. No dual clip.
    """
    options = options_as(ClipCovOptions, inputs.options)
    cov_T = _covariance_T(inputs.batch.columns, inputs.counts.extras)
    candidate_T = inputs.mask_T & (cov_T > options.clip_cov_lb) & (cov_T < options.clip_cov_ub)
    taken_T = candidate_T & (inputs.batch.columns["uniform"] <= inputs.counts.extras[_THRESHOLD])
    plain_T, clipped_T = clipped_losses(
        inputs, probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    )
    return TokenLoss(
        torch.where(taken_T, 0.0, torch.maximum(plain_T, clipped_T)),
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/cov_clipfrac": taken_T.to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def kl_cov_prepass(inputs: PrepassInputs) -> Mapping[str, float]:
    """Return means, the smallest covariance of a penalised token, and the share of tied tokens.

    The share is the fraction that is penalised of the tokens with exactly that covariance.
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
    """``-A r``, with a penalty on the tokens of the largest covariance.

    arXiv:2505.22617 sec. 4.3; for the covariance see `clip_cov_loss`.

    The `kl_cov_ratio` of the step's tokens with the largest covariance, rounded down, have the
    penalty ``ppo_kl_coef |log pi - log pi_old|``. Tokens that tie for the last places share them:
    certain tokens (log pi = 0) of equal advantage tie by the thousand. No clip.
    """
    options = options_as(KlCovOptions, inputs.options)
    extras = inputs.counts.extras
    cov_T = _covariance_T(inputs.batch.columns, extras)
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    above_T, ties_T = cov_T > extras[_THRESHOLD], cov_T == extras[_THRESHOLD]
    taken_T = above_T.to(ratio_T) + extras[_SHARE] * ties_T.to(ratio_T)
    return TokenLoss(
        options.ppo_kl_coef * taken_T * (inputs.logprobs_T - inputs.old_logprobs_T).abs()
        - inputs.advantages_T * ratio_T,
        {
            "actor/cov_klfrac": taken_T,
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def _means(inputs: PrepassInputs) -> tuple[int, dict[str, float]]:
    """Return the step's number of trained tokens, and their mean advantage and logprob."""
    columns, mask_T = inputs.batch.columns, inputs.mask_T
    summed = (columns["advantages"], columns["old_logprobs"])
    totals = (column[mask_T].to(torch.float64).sum() for column in summed)
    own = torch.stack([mask_T.sum().to(torch.float64), *totals])
    sums = inputs.gather(own).reshape(-1, 3).sum(dim=0).tolist()
    num_tokens = max(1.0, sums[0])
    return int(sums[0]), {_ADVANTAGE: sums[1] / num_tokens, _LOGPROB: sums[2] / num_tokens}


def _covariance_T(columns: Mapping[str, Tensor], means: Mapping[str, float]) -> Tensor:
    """Return (T,) float64 covariances: a threshold selects the same tokens for any cut."""
    advantages_T = columns["advantages"].to(torch.float64) - means[_ADVANTAGE]
    return advantages_T * (columns["old_logprobs"].to(torch.float64) - means[_LOGPROB])
