"""Values of the plots of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """Values over the steps of consecutive stages.

    Attributes:
        steps: step numbers, counted over all stages.
        bounds: first steps of the stages after the first, drawn as lines.
        low: lower ends of the values' intervals, one per step, or empty.
        high: upper ends, likewise.
    """

    steps: Sequence[float]
    values: Sequence[float]
    bounds: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class PairCurves:
    """Curves of stages that train on pairs of answers; a metric without records has none.

    Attributes:
        accuracy: share of a step's pairs whose chosen answer has the larger reward in the loss.
        held_out: the same for held-out pairs, with intervals; step 0 is before training.
        margin: mean difference of the rewards of a step's pairs in the loss.
    """

    accuracy: Sequence[Curve] = ()
    held_out: Sequence[Curve] = ()
    loss: Sequence[Curve] = ()
    margin: Sequence[Curve] = ()


@dataclass(frozen=True)
class Bar:
    """A measured share in [0, 1] with its interval, if there is one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PlotData:
    """Everything that is drawn; an empty part is left out.

    Attributes:
        preference: of training on preferences, in all iterations of self-play.
        reward: mean reward per RL step.
        lengths: mean response length per RL step.
        accuracy: held-out accuracy per stage.
        step: seconds by phase of the median RL step, in the order of the loop.
        seconds: wall seconds by phase, per stage.
    """

    loss: Curve | None = None
    reward_model: PairCurves = PairCurves()
    preference: PairCurves = PairCurves()
    reward: Curve | None = None
    distillation: Curve | None = None
    lengths: Curve | None = None
    accuracy: Sequence[Bar] = ()
    step: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
