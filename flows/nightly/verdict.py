"""Compares a night with its baseline: pass, drift or fail, with stage and cause.

* A stage with the stored digest is reproduced, whatever its speed. If all are, the recipe passes.
* A stage with another digest is compared by accuracy and by its curve of rewards or losses. Outside
  the spread of the stored runs plus a tolerance, in either direction, the recipe fails; within it,
  it drifts. An implausibly good value fails, too.
* The first stage with another digest is named, with differences of its settings, sources, libraries
  and data. If there are none, the stage is not deterministic.
* On another kind of machine digests are not compared, only these values; nothing drifts there.
* Speed and memory are compared on an equal machine with at least `MIN_RUNS` stored runs, else
  noted. Much more memory fails; much lower speed fails only if the digest differs, too.
* A run that did not finish fails at the stage where it stopped. Without a baseline it drifts.

Promises: pure functions; equal measurements give equal verdicts.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from flows.nightly.measurement import Measurement, Observed
from infra.frozen_model import FrozenModel
from infra.store.stage_spec import some
from tasks.runner.earlier_work import differing

Word = Literal["pass", "drift", "fail"]

MIN_ACCURACY_ROOM = 0.01
CURVE_ROOM = 0.02
"""Tolerance relative to the largest absolute value of a curve, or to 1 if all are smaller."""
NUM_NOISES = 3.0
"""Tolerance of a stretch's mean, in standard deviations."""
NUM_STRETCHES = 4
"""Number of stretches of a curve, which are compared by their means."""
SPEED_ROOM, MEMORY_ROOM = 0.25, 0.10
MIN_RUNS = 3
"""With fewer runs, the variation of speed and memory is unknown."""
NOTHING_DIFFERS = "nothing that is recorded differs: the stage does not repeat"


class Verdict(FrozenModel):
    """Verdict on a recipe."""

    recipe: str
    word: Word
    stage: str = ""
    """The first stage that failed, or else drifted; empty for a pass."""
    drifted: str = ""
    """The first stage whose digest is not the stored one."""
    causes: tuple[str, ...] = ()
    """Differences in the inputs of the drifted stage."""
    problems: tuple[str, ...] = ()
    """Reasons of a failure."""
    notes: tuple[str, ...] = ()


def judge(baseline: Measurement | None, tonight: Measurement) -> Verdict:
    """Compare a night with the baseline of the recipe; None if there is no baseline."""
    stopped = (f"{tonight.stopped_at}: {tonight.problem}",) if tonight.problem else ()
    if baseline is None:
        note = "no baseline is stored; `rlhf nightly --accept` takes this night for one"
        return Verdict(
            recipe=tonight.recipe,
            word="fail" if stopped else "drift",
            stage=tonight.stopped_at,
            problems=stopped,
            notes=() if stopped else (note,),
        )
    comparable = baseline.machine.kind == tonight.machine.kind
    # Tonight's stages, then those that only the baseline has, unless the run stopped.
    labels = dict.fromkeys((*tonight.stages, *(() if tonight.problem else baseline.stages)))
    digests = [
        {label: made.digest for label, made in each.stages.items()} for each in (baseline, tonight)
    ]
    changed = [label for label in labels if digests[0].get(label) != digests[1].get(label)]
    drifted = changed[0] if changed and comparable else ""
    problems, notes = _compared(baseline, tonight, changed if comparable else None)
    if not comparable:
        where = f"the baseline is of {baseline.machine}, this is {tonight.machine}"
        notes.insert(0, f"digests were not compared: {where}")
    failed = problems[0][0] if problems else tonight.stopped_at
    return Verdict(
        recipe=tonight.recipe,
        word="fail" if failed else "drift" if drifted else "pass",
        stage=failed or drifted,
        drifted=drifted,
        causes=tuple(_causes(baseline, tonight, drifted)) if drifted else (),
        problems=(*(f"{label}: {text}" for label, text in problems), *stopped),
        notes=tuple(notes),
    )


def _compared(
    baseline: Measurement, tonight: Measurement, changed: Sequence[str] | None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return problems as (stage, text), and notes, both in the order of the stages.

    Accuracy and curve are compared for `changed` stages; None means all.
    """
    problems: list[tuple[str, str]] = []
    notes: list[str] = []
    for label, now in tonight.runs[-1].stages.items():
        before = [run.stages[label] for run in baseline.runs if label in run.stages]
        is_known = baseline.machine == tonight.machine and len(before) >= MIN_RUNS
        is_other = changed is None or label in changed
        if is_other:
            problems += [(label, text) for text in _figures_beyond(before, now)]
        for text, is_clock in _resources_beyond(before, now):
            if is_known and (is_other or not is_clock):
                problems.append((label, text))
            else:
                notes.append(f"{label}: {text}")
    return problems, notes


def _figures_beyond(before: Sequence[Observed], now: Observed) -> Iterator[str]:
    """Yield accuracy and curve if they are outside the spread of earlier runs."""
    known = [each for each in before if each.accuracy is not None]
    values = [each.accuracy for each in known if each.accuracy is not None]
    if now.accuracy is not None and values:
        room = max(MIN_ACCURACY_ROOM, *(each.accuracy_room for each in known))
        if not min(values) - room <= now.accuracy <= max(values) + room:
            yield f"accuracy {now.accuracy:.1%}, stored {_span(values, '.1%')}, room {room:.1%}"
    curves = [each.curve for each in before if each.curve]
    stored = [_stretches(curve) for curve in curves]
    for number, value in enumerate(_stretches(now.curve) if curves else ()):
        means = [each[number] for each in stored if number < len(each)]
        room = _curve_room(curves[-1])
        if means and not min(means) - room <= value <= max(means) + room:
            of = f"{number + 1} of {NUM_STRETCHES}"
            yield f"curve {value:.4g} in stretch {of}, stored {_span(means)}, room {room:.2g}"
            return


def _resources_beyond(before: Sequence[Observed], now: Observed) -> Iterator[tuple[str, bool]]:
    """Yield speed and memory worse than in all earlier runs, each with True if it is the speed."""
    speeds = [each.tokens_per_s for each in before if each.tokens_per_s]
    if speeds and now.tokens_per_s and now.tokens_per_s < min(speeds) * (1 - SPEED_ROOM):
        ratio = now.tokens_per_s / statistics.median(speeds)
        yield f"{now.tokens_per_s:,.0f} tokens/s, {ratio:.2f} of the stored median", True
    peaks = [each.peak_bytes for each in before if each.peak_bytes]
    if peaks and now.peak_bytes and now.peak_bytes > max(peaks) * (1 + MEMORY_ROOM):
        ratio = now.peak_bytes / statistics.median(peaks)
        yield f"{now.peak_bytes / 2**20:,.0f} MiB, {ratio:.2f} of the stored median", False


def _stretches(curve: Sequence[float]) -> list[float]:
    """Return means of equal consecutive parts of a curve; a short curve gives its values."""
    num = min(NUM_STRETCHES, len(curve))
    ends = [len(curve) * part // num for part in range(num + 1)] if num else []
    return [statistics.fmean(curve[a:b]) for a, b in pairwise(ends)]


def _curve_room(curve: Sequence[float]) -> float:
    """Return the difference of stretch means that sampling noise alone explains.

    The noise of a step is estimated from second differences, which are insensitive to a slope: the
    variance of x[i] - 2 x[i+1] + x[i+2] is six times that of x.
    """
    floor = CURVE_ROOM * max(1.0, *(abs(value) for value in curve if math.isfinite(value)), 0.0)
    bends = [a - 2 * b + c for a, b, c in zip(curve, curve[1:], curve[2:], strict=False)]
    noise = math.sqrt(statistics.fmean(bend**2 for bend in bends) / 6) if bends else 0.0
    return max(floor, NUM_NOISES * noise / math.sqrt(max(1, len(curve) // NUM_STRETCHES)))


def _span(values: Sequence[float], form: str = ".4g") -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _causes(baseline: Measurement, tonight: Measurement, label: str) -> list[str]:
    before, now = baseline.stages.get(label), tonight.stages.get(label)
    settings = differences(baseline.settings, tonight.settings)
    if before is None or now is None:
        return [f"settings: {some(settings)}" if settings else "the recipe has other stages"]
    files = baseline.sources.get(before.sources, {}), tonight.sources.get(now.sources, {})
    kinds = {
        "settings": settings if before.settings != now.settings else [],
        "sources": [*differing(*files)],
        "libraries": differences(before.libraries, now.libraries),
        "data": [*differing(before.data, now.data)],
    }
    return [f"{kind}: {some(what)}" for kind, what in kinds.items() if what] or [NOTHING_DIFFERS]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List each name whose values differ, with both values."""
    return [f"{name} {old} -> {new}" for name, (old, new) in differing(before, now).items()]
