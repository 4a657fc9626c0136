"""pass@k and the Wilson interval of a share; imports no torch."""

from math import comb, sqrt
from statistics import NormalDist


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k samples is right.

    arXiv:2107.03374 eq. 1: ``1 - C(n - c, k) / C(n, k)`` with n `num_samples`, c `num_correct`.
    Raises `ValueError` if k is not in [1, n], or c is not in [0, n].
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right out of {num_samples} is not defined")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def wilson_interval(
    num_correct: float, num_problems: float, confidence: float
) -> tuple[float, float]:
    """Return the score interval of a binomial share (Wilson 1927), without continuity correction.

    It stays inside [0, 1] and is right near 0 and 1. A tie may count half; `num_problems` may be an
    effective number. Raises `ValueError` if there are no trials, or more successes than trials.
    """
    if num_problems < 1 or not 0 <= num_correct <= num_problems:
        raise ValueError(f"no interval for {num_correct:g} out of {num_problems:g}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_correct / num_problems
    spread = z * sqrt(share * (1 - share) / num_problems + z * z / (4 * num_problems**2))
    scale = 1 + z * z / num_problems
    centre = share + z * z / (2 * num_problems)
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(share, low)), min(1.0, max(share, high))
