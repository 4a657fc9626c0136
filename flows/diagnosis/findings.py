"""Reads a run's stages for a diagnosis, whose inputs and findings are plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from pydantic import ValidationError

from engines.config.stages.base import StageConfig
from flows import stage_order
from infra.store.process_stamp import is_dead
from infra.store.runs import KnownRun
from infra.store.stage_log import latest_commit
from infra.store.work_channel import JobProblem
from infra.tracking.journal import StageHistory

Area = Literal["resources", "communication", "algorithm"]
"""Areas in the order of diagnosis, in which causes come before their symptoms."""
Severity = Literal["failed", "sick", "note"]


@dataclass(frozen=True)
class Evidence:
    """A recorded number or mean of a window, optionally with an earlier value to compare.

    Attributes:
        metric: its name in the journal or the commit record.
        step: last step of the value; None if it belongs to no step.
        was: the earlier value, if any.
        was_step: last step of the earlier value.
        was_in: label of the stage of the earlier value.
    """

    metric: str
    value: float
    step: int | None = None
    was: float | None = None
    was_step: int | None = None
    was_in: str = ""

    def __str__(self) -> str:
        was = ""
        if self.was is not None:
            was = f", was {self.was:.4g}{_at(self.was_step)} in {self.was_in}"
        return f"{self.metric} {self.value:.4g}{_at(self.step)}{was}"


def _at(step: int | None) -> str:
    return f" at step {step}" if step is not None else ""


@dataclass(frozen=True)
class Finding:
    """One finding about a stage.

    Attributes:
        next: what to try, most promising first.
        severity: `failed` ended the stage, `sick` crosses a threshold, `note` is information.
        rejected: True if the stage is a round whose policy was rejected.
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
        """Label of the stage, marked if it was rejected."""
        return f"rejected {self.stage}" if self.rejected else self.stage


@dataclass(frozen=True)
class StageView:
    """Journal and commit of a stage, up to its current step; an absent commit has empty fields.

    Attributes:
        messages: log lines, oldest first.
        problem: error of the newest attempt, if it ended without a commit and reported one.
        phase: phase that the last heartbeat named; empty without a heartbeat.
        is_gone: True without a commit or a reported error if its process is certainly dead.
        seconds: time of each phase of the committed job.
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
        """Last step with metrics."""
        return max(self.steps, default=None)


Points = Sequence[tuple[int, float]]
"""Values of one metric as (step, value), ascending by step, all finite."""


def points(views: Sequence[StageView], *names: str) -> tuple[str, Points]:
    """Return the name and the finite points of the first of `names` that any step has.

    The name is empty if no step has one of them.
    """
    return finite_points(
        {step: found for view in views for step, found in view.steps.items()}, names
    )


def finite_points(
    values: Mapping[int, Mapping[str, float]], names: Sequence[str]
) -> tuple[str, Points]:
    """Return the name and points as `points` does, from metrics by step."""
    name = next((each for each in names if any(each in found for found in values.values())), "")
    found = ((step, values[step][name]) for step in sorted(values) if name in values[step])
    return name, [point for point in found if isfinite(point[1])]


def windows(curve: Points, num_steps: int) -> list[float]:
    """Return means over non-overlapping windows aligned to the end of a curve, oldest first."""
    values = [value for _, value in curve]
    ends = range(len(values), num_steps - 1, -num_steps)
    return [sum(values[end - num_steps : end]) / num_steps for end in reversed(ends)]


def compared(views: Sequence[StageView], metric: str, num_steps: int, earlier: int = 0) -> Evidence:
    """Compare a curve's last window with the one at index `earlier`; there must be at least two."""
    _, curve = points(views, metric)
    means = windows(curve, num_steps)
    step, _ = curve[len(curve) - 1 - num_steps * (len(means) - 1 - earlier)]
    # `points` takes a step from the last view that has it.
    place = next(view.label for view in reversed(views) if step in view.steps)
    return Evidence(metric, means[-1], curve[-1][0], means[earlier], step, place)


_STAGES: dict[str, type[StageConfig]] = {
    each.stage: each
    for each in vars(stage_order).values()
    if isinstance(each, type) and issubclass(each, StageConfig) and hasattr(each, "stage")
}


def run_views(history: StageHistory, run: KnownRun, only: str = "") -> list[StageView]:
    """Return the stages of a run, in the order in which it last requested them.

    Of several stages with one label, only the last is returned. `only` selects one by fingerprint.
    """
    asked = sorted(run.used_at, key=lambda fingerprint: run.used_at[fingerprint])
    return stage_views(history, [each for each in asked if only in {"", each}])


def stage_views(history: StageHistory, fingerprints: Iterable[str]) -> list[StageView]:
    """Return the stages that have a readable specification; of several with one label, the last."""
    newest: dict[str, StageView] = {}
    for fingerprint in fingerprints:
        if view := _view(history, fingerprint):
            newest.pop(view.label, None)  # the last one takes the last place
            newest[view.label] = view
    return list(newest.values())


def _view(history: StageHistory, fingerprint: str) -> StageView | None:
    """Read a stage; None if no attempt left a specification that this code can read."""
    spec = history.specification(fingerprint)
    if spec is None or spec.stage not in _STAGES:
        return None
    try:
        config = _STAGES[spec.stage].model_validate(spec.config)
    except ValidationError:
        return None
    records, _ = history.records(fingerprint, "")
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        if record.step is not None:
            steps.setdefault(record.step, {}).update(record.values)
    log = history.storage.attempts.entries(fingerprint)
    channel = history.storage.channel(fingerprint)
    is_open = bool(log) and log[-1].kind == "held"
    problem = channel.read_error(log[-1].number) if is_open else None
    beat = channel.read_beat(log[-1].number) if is_open else None
    commit = latest_commit(log)
    return StageView(
        label=config.label,
        config=config,
        steps=steps,
        messages=tuple(record.message for record in records if record.kind == "log"),
        problem=problem,
        phase=beat.phase if beat else "",
        is_gone=problem is None and beat is not None and is_dead(beat.process),
        is_committed=commit is not None,
        metrics=commit.metrics if commit else {},
        seconds=commit.seconds if commit else {},
    )
