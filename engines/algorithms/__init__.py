"""Algorithms: advantages, policy losses, KL, aggregation; each one a registered pure function."""

from engines.algorithms.advantage import advantages
from engines.algorithms.filtering import informative_samples
from engines.algorithms.overlong import overlong_penalty
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.supervised import sft_loss_fn
from engines.algorithms.validation import validate_algorithm

__all__ = [
    "advantages",
    "informative_samples",
    "overlong_penalty",
    "policy_loss_fn",
    "sft_loss_fn",
    "validate_algorithm",
]
