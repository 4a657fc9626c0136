"""Verdicts on two models, or on one before and after training, from a stage's metrics."""

from collections.abc import Mapping
from typing import Literal

Verdict = Literal["better", "worse", "alike", "higher", "lower"]
"""`higher` and `lower` are used if it is unknown which direction is better."""
GAIN, MARGIN = "gain/", "margin/"
"""Prefixes of a metric's name: the difference to the other model, and its statistical margin."""
HIGHER_IS_BETTER = "higher_is_better/"
"""Prefix of a metric's name: 1 if a larger value is better, 0 if not; absent if unknown."""
BEFORE = "before/"
"""Prefix of a metric's name: its value before the first step."""
PAIR_ACCURACY, PAIR_MARGIN, NUM_PAIRS = "pair_accuracy", "pair_margin", "num_pairs"
"""On held-out pairs: share ranked correctly, mean reward difference, number of pairs."""


def verdict(gain: float, margin: float, higher_is_better: float | None) -> Verdict:
    """Judge a difference; `higher_is_better` is 1 or 0, None if the direction is unknown."""
    if abs(gain) <= margin:
        return "alike"
    if higher_is_better is None:
        return "higher" if gain > 0 else "lower"
    return "better" if (gain > 0) == bool(higher_is_better) else "worse"


def verdicts(metrics: Mapping[str, float]) -> dict[str, Verdict]:
    """Return the verdict by metric; empty for a stage that compares no models."""
    names = [key.removeprefix(GAIN) for key in metrics if key.startswith(GAIN)]
    return {
        name: verdict(
            metrics[GAIN + name], metrics[MARGIN + name], metrics.get(HIGHER_IS_BETTER + name)
        )
        for name in names
    }
