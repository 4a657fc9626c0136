"""The guard against training on what was quick to sample."""

import pytest

from engines.errors import RolloutError
from engines.trainers.experience import check_aborted
from engines.types import Completion


def row(*reasons: str) -> list[Completion]:
    return [Completion("p", place, (), (), (), reason) for place, reason in enumerate(reasons)]


def test_a_share_up_to_the_limit_passes() -> None:
    check_aborted([row("stop", "abort"), row("length", "stop")], 0.25, 9.0)
    check_aborted([row("abort")], 1.0, 9.0)
    check_aborted([], 0.0, 9.0)


def test_more_of_them_stop_the_run_and_name_the_deadline() -> None:
    with pytest.raises(RolloutError) as caught:
        check_aborted([row("stop", "abort"), row("abort", "stop")], 0.1, 9.0)
    assert str(caught.value) == (
        "rollout.timeout_s: got 9; 2 of 4 samples were unfinished by then, more than "
        "rl.max_aborted_frac = 0.1, and the remaining ones are the short ones; need time for all "
        "of them; raise it, or lower rl.sampling.max_new_tokens"
    )
