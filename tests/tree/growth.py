"""How the processor's time of a computation grows with its work, where nothing can be counted.

A ratio of two computations in one process says the same on a slow machine as on a fast one.
"""

import time
from collections.abc import Callable
from typing import Any

MAX_FACTOR = 12.0
"""Of ten times the work: what is linear, and two tenths for memory that is further away."""
NUM_TRIES = 5
NOISE_S = 2e-3
"""The smaller computation counts as no less: what takes less is lost among other things."""


def cpu_s(work: Callable[[], Any]) -> float:
    """Seconds of the processor in this thread."""
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def grows_in_proportion(work: Callable[[], Any], tenfold: Callable[[], Any]) -> bool:
    """Whether ten times the work costs no more than that; the best of several tries counts.

    Args:
        work: a computation.
        tenfold: the same of ten times as much.

    Returns:
        Whether it costs at most `MAX_FACTOR` times as much.
    """
    least_s, least_tenfold_s = float("inf"), float("inf")
    for _ in range(NUM_TRIES):
        least_s, least_tenfold_s = min(least_s, cpu_s(work)), min(least_tenfold_s, cpu_s(tenfold))
        if least_tenfold_s <= MAX_FACTOR * max(least_s, NOISE_S):
            return True
    return False
