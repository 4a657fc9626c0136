"""Inputs and findings of a diagnosis, as plain values; nothing here reads or writes files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from engines.config.stages.base import StageConfig
from infra.store.work_channel import JobProblem

Area = Literal["resources", "communication", "algorithm"]
"""In the order in which they are looked at: a cause in one shows as a symptom in the next."""
Severity = Literal["failed", "sick", "note"]


@dataclass(frozen=True)
class Evidence:
    """A number that was found.

    Attributes:
        metric: its name in the journal or the commit record.
        value: as it was recorded, or the mean of a window.
        step: the last one that it speaks of; None where it belongs to no step.
        was: the earlier value beside which it stands; None where there is none.
        was_step: the last one that the earlier value speaks of; None as of `step`.
        was_in: label of the stage of the earlier value.
    """

    metric: str
    value: float
    step: int | None = None
    was: float | None = None
    was_step: int | None = None
    was_in: str = ""

    def __str__(self) -> str:
        text = f"{self.metric} {self.value:.4g}{_at(self.step)}"
        if self.was is None:
            return text
        return f"{text}, was {self.was:.4g}{_at(self.was_step)} in {self.was_in}"


def _at(step: int | None) -> str:
    return f" at step {step}" if step is not None else ""


@dataclass(frozen=True)
class Finding:
    """Something worth knowing.

    Attributes:
        area: where it belongs.
        stage: label of the stage that shows it.
        text: what was found, in words.
        next: what to try first, and then.
        severity: `failed` ended the stage, `sick` crosses a threshold, `note` is only told.
        rejected: whether the stage is a round from which nothing follows.
    """

    area: Area
    symptom: str
    stage: str
    text: str
    evidence: tuple[Evidence, ...] = ()
    next: tuple[str, ...] = ()
    severity: Severity = "sick"
    rejected: bool = False

    @property
    def place(self) -> str:
        """The stage, and whether it was rejected."""
        return f"rejected {self.stage}" if self.rejected else self.stage


@dataclass(frozen=True)
class StageView:
    """Journal and commit of a stage, as far as it has come.

    Attributes:
        label: within the run.
        steps: metrics by step.
        messages: lines for people, oldest first.
        problem: why its newest attempt ended without a commit; None: it did not say so.
        phase: of its last sign of life; empty where there is none.
        is_gone: it has no commit, said nothing, and its process is certainly dead.
        is_committed: it is done.
        metrics: of its commit; empty before.
        seconds: of its job's phases, the same.
    """

    label: str
    config: StageConfig
    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    problem: JobProblem | None = None
    phase: str = ""
    is_gone: bool = False
    is_committed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def last_step(self) -> int | None:
        """The last step with metrics."""
        return max(self.steps, default=None)


Points = Sequence[tuple[int, float]]
"""Values of one metric: (step, value), ascending, all finite."""


def points(views: Sequence[StageView], *names: str) -> tuple[str, Points]:
    """One curve over some stages.

    Args:
        views: in order.
        *names: metrics, of which the first that any step has is taken.

    Returns:
        The metric, empty if there is none, and its finite points.
    """
    values = {step: found for view in views for step, found in view.steps.items()}
    for name in names:
        found = [(step, values[step][name]) for step in sorted(values) if name in values[step]]
        if found:
            return name, [point for point in found if isfinite(point[1])]
    return "", []


def windows(curve: Points, num_steps: int) -> list[float]:
    """Means over windows that do not overlap, aligned to the end of a curve.

    Returns:
        Oldest first; fewer than two say nothing.
    """
    values = [value for _, value in curve]
    ends = range(len(values), num_steps - 1, -num_steps)
    return [sum(values[end - num_steps : end]) / num_steps for end in reversed(ends)]


def compared(views: Sequence[StageView], metric: str, num_steps: int, earlier: int = 0) -> Evidence:
    """The last window of a curve beside an earlier one.

    Args:
        views: in order.
        metric: of the curve, which has two windows or more.
        earlier: index of the other window, oldest first.

    Returns:
        Both means, each with the last step of its window.
    """
    _, curve = points(views, metric)
    means = windows(curve, num_steps)
    step, _ = curve[len(curve) - 1 - num_steps * (len(means) - 1 - earlier)]
    # Of two views that have a step, `points` takes the latter.
    place = next(view.label for view in reversed(views) if step in view.steps)
    return Evidence(metric, means[-1], curve[-1][0], means[earlier], step, place)
