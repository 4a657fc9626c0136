"""The guard against training on what was quick to sample.

Promises: no step trains on samples of which more than a share were unfinished at the deadline:
those are the longest answers, and without them the policy learns to be short.
Does not know what makes sampling slow.
"""

from collections.abc import Sequence

from engines.errors import RolloutError
from engines.types import Completion


def check_aborted(
    completions: Sequence[Sequence[Completion]], max_aborted_frac: float, timeout_s: float
) -> None:
    """Stop a run whose sampling is too slow for its deadline.

    Args:
        completions: of one generation batch, by request.
        max_aborted_frac: largest share of them that may be aborted.
        timeout_s: the deadline, in seconds.

    Raises:
        RolloutError: the share is larger; names the deadline.
    """
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
