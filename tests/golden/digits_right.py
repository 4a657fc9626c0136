"""A reward that a model has something of before it is right: the share of digits."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """How many characters of the answer stand where those of the truth do, of all."""
    pairs = zip(solution_str, ground_truth, strict=False)
    return sum(a == b for a, b in pairs) / max(len(solution_str), len(ground_truth), 1)
