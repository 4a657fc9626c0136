"""What a stage's metrics say of two models, or of one before and after its training."""

from collections.abc import Mapping
from typing import Literal

Verdict = Literal["better", "worse", "alike", "higher", "lower"]
"""The last two where nobody says which way is better."""
GAIN, MARGIN = "gain/", "margin/"
"""In front of a metric's name: by how much it is larger, and what chance alone gives."""
HIGHER_IS_BETTER = "higher_is_better/"
"""In front of a metric's name: 1 where a larger value is the better one, 0 where a smaller one is;
absent where nobody says."""
BEFORE = "before/"
"""In front of a metric's name: what it was before the first step."""
PAIR_ACCURACY, PAIR_MARGIN, NUM_PAIRS = "pair_accuracy", "pair_margin", "num_pairs"
"""Of held-out pairs: the share told apart, the mean difference of their rewards, how many."""


def verdict(gain: float, margin: float, higher_is_better: bool | None) -> Verdict:
    """What a gain says of the model.

    Args:
        gain: by how much its value is larger.
        margin: what chance alone gives.
        higher_is_better: which way is better; None: nobody says.

    Returns:
        `alike` where the gain lies within the margin.
    """
    if abs(gain) <= margin:
        return "alike"
    if higher_is_better is None:
        return "higher" if gain > 0 else "lower"
    return "better" if (gain > 0) == higher_is_better else "worse"


def verdicts(metrics: Mapping[str, float]) -> dict[str, Verdict]:
    """What a comparison found.

    Args:
        metrics: of a stage.

    Returns:
        The verdict by metric; nothing of a stage that compares no models.
    """
    gains = {
        name.removeprefix(GAIN): gain for name, gain in metrics.items() if name.startswith(GAIN)
    }
    return {
        name: verdict(gain, metrics[MARGIN + name], _direction(metrics, name))
        for name, gain in gains.items()
    }


def _direction(metrics: Mapping[str, float], name: str) -> bool | None:
    said = metrics.get(HIGHER_IS_BETTER + name)
    return None if said is None else bool(said)
