"""What a stage's metrics say of two models, or of one before and after its training."""

from collections.abc import Mapping
from typing import Literal

Verdict = Literal["better", "worse", "alike"]
GAIN, MARGIN = "gain/", "margin/"
"""In front of a metric's name: by how much it is larger, and what chance alone gives."""
BEFORE = "before/"
"""In front of a metric's name: what it was before the first step."""
PAIR_ACCURACY, PAIR_MARGIN, NUM_PAIRS = "pair_accuracy", "pair_margin", "num_pairs"
"""Of held-out pairs: the share told apart, the mean difference of their rewards, how many."""


def verdict(gain: float, margin: float) -> Verdict:
    """Whether a gain lies beyond what chance gives; `alike` where it does not."""
    if abs(gain) <= margin:
        return "alike"
    return "better" if gain > 0 else "worse"


def verdicts(metrics: Mapping[str, float]) -> dict[str, Verdict]:
    """What a comparison found.

    Args:
        metrics: of a stage.

    Returns:
        The verdict by metric; nothing of a stage that compares no models.
    """
    return {
        name.removeprefix(GAIN): verdict(gain, metrics[MARGIN + name.removeprefix(GAIN)])
        for name, gain in metrics.items()
        if name.startswith(GAIN)
    }
