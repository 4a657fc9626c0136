"""Curves of training, from the journals of a run's stages.

Promises: a step has one point even if several attempts recorded it; a metric without records has no
curve.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from flows.report.plot_data import Curve, PairCurves
from infra.tracking.comparison import PAIR_ACCURACY
from infra.tracking.journal import JournalRecord

STEP_PHASES = (
    "gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv", "update_critic",
    "update_actor", "update_weights",
)  # fmt: skip
"""Phases of `timing_s/*`, in the order of the loop."""
IDLE_S = 5e-5
"""Phases shorter than this are not shown."""
HELD_OUT = f"val-core/{PAIR_ACCURACY}"

Journal = Sequence[JournalRecord]
Points = Mapping[int, Mapping[str, float]]
"""Values of the records that have a metric, by step, ascending."""


def run_on(journals: Sequence[Journal], metric: str) -> Curve:
    """Return one metric over consecutive rounds, with steps counted continuously.

    A round may count its steps from 1 or continue the count. The curve is empty without the metric.
    """
    steps: list[float] = []
    values: list[float] = []
    bounds: list[float] = []
    for journal in journals:
        points = _points(journal, metric)
        shift = len(steps)
        if steps and points:
            bounds.append(shift + 1)
        steps += range(shift + 1, shift + len(points) + 1)
        values += [found[metric] for found in points.values()]
    return Curve(steps, values, bounds)


def pair_curves(journals: Sequence[Journal], trainer: str) -> PairCurves:
    """Return the curves of stages that train on pairs.

    Args:
        journals: of one stage or of all iterations, in order; each counts from step 1.
        trainer: prefix of the metrics, `preference` or `reward_model`.
    """
    return PairCurves(
        accuracy=_stage_by_stage(journals, f"{trainer}/accuracy"),
        held_out=_stage_by_stage(journals, HELD_OUT),
        loss=_stage_by_stage(journals, "train/loss"),
        margin=_stage_by_stage(journals, f"{trainer}/margin"),
    )


def _stage_by_stage(journals: Sequence[Journal], metric: str) -> list[Curve]:
    """Return a separate curve for each stage, since each has its own reference and pairs."""
    curves: list[Curve] = []
    shift = 0
    for journal in journals:
        points = _points(journal, metric)
        if points:
            values, low, high = (
                [found[name] for found in points.values() if name in found]
                for name in (metric, f"{metric}_low", f"{metric}_high")
            )
            steps, bounds = [shift + step for step in points], [shift + 1] if shift else []
            curves.append(Curve(steps, values, bounds, low, high))
        shift += max((record.step for record in journal if record.step is not None), default=0)
    return curves


def median_step(journals: Iterable[Journal]) -> dict[str, float]:
    """Return the seconds of each phase in the median training step, and the rest as `other`.

    Empty if no step trained.
    """
    steps = [
        record.values
        for journal in journals
        for record in journal
        if "timing_s/update_actor" in record.values
    ]
    if not steps:
        return {}
    medians = {
        phase: median(values.get(f"timing_s/{phase}", 0.0) for values in steps)
        for phase in STEP_PHASES
    }
    phases = {phase: seconds for phase, seconds in medians.items() if seconds >= IDLE_S}
    rest = median(values["timing_s/step"] for values in steps) - sum(phases.values())
    return phases | {"other": max(0.0, rest)}


def _points(journal: Journal, metric: str) -> Points:
    found = {
        record.step: record.values
        for record in journal
        if record.step is not None and metric in record.values
    }
    return dict(sorted(found.items()))
