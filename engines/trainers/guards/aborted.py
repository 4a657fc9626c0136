"""Guard against training only on samples that finish quickly.

Without the longest answers, unfinished at the deadline, the policy would learn to be short.
"""

from collections.abc import Sequence

from engines.errors import RolloutError
from engines.types import Completion


def check_aborted(
    completions: Sequence[Sequence[Completion]], max_aborted_frac: float, timeout_s: float
) -> None:
    """Raise `RolloutError` if more than `max_aborted_frac` of a generation batch was aborted."""
    reasons = [completion.finish_reason for row in completions for completion in row]
    num_aborted = reasons.count("abort")
    if num_aborted <= max_aborted_frac * len(reasons):
        return
    raise RolloutError(
        f"rollout.timeout_s: got {timeout_s:g}; {num_aborted} of {len(reasons)} samples were "
        f"unfinished by then, more than rl.max_aborted_frac = {max_aborted_frac:g}, and those that "
        "are left are the short ones; need time for all of them; raise it, or lower "
        "rl.sampling.max_new_tokens"
    )
