"""An advantage estimator, a policy loss and a KL estimator; each is one pure function."""

import torch
from torch import Tensor

from engines.algorithms.parts import AdvantageInputs, Advantages, PolicyLossInputs, TokenLoss
from example_chip.options import ClippedOptions


def example_advantages(inputs: AdvantageInputs) -> Advantages:
    """What each sample earned, less the mean of its group."""
    outcomes_B = inputs.outcomes_B
    sizes_P = torch.bincount(inputs.group_B, minlength=inputs.num_groups).clamp(min=1)
    sums_P = torch.zeros(inputs.num_groups, dtype=outcomes_B.dtype)
    sums_P.index_add_(0, inputs.group_B, outcomes_B)
    centred_B = outcomes_B - (sums_P / sizes_P)[inputs.group_B]
    # The rounding error of a mean of equal scores is no advantage.
    centred_B = torch.where(centred_B.abs() < 1e-12, 0.0, centred_B)
    return Advantages.of_samples(centred_B, inputs.batch)


def example_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """``-A min(pi / pi_old, max_ratio)`` of each token."""
    options = inputs.options
    assert isinstance(options, ClippedOptions)
    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).clamp(-20, 20).exp()
    bounded_T = ratio_T.clamp(max=options.max_ratio)
    return TokenLoss(-inputs.advantages_T * bounded_T, {"actor/example_ratio": ratio_T})


def example_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) (log pi - log pi_ref)^2."""
    return (logprobs_T - ref_logprobs_T).square()
