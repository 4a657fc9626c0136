"""One night: its directory, and how its results are compared, stored and accepted.

    <home>/nightly/<night>/                a home of its own, with Ray, MLflow and reports
    <home>/nightly/<night>/stores/<recipe> a store for each recipe
    <home>/nightly/<night>/night.json      measurements and verdicts; night.md and plots beside it

A night shares no store, tracking server or registry with ordinary runs or other nights. It is
compared with its baseline: pass, drift or fail, with stage and cause.

* A stage with the stored digest is reproduced, whatever its speed. If all are, nothing drifts.
* A stage with another digest is compared by accuracy and by its curve of rewards or losses. Outside
  the spread of the stored runs plus a tolerance, in either direction, the recipe fails; within it,
  it drifts. An implausibly good value fails, too.
* The first stage with another digest is named, with differences of its settings, sources, libraries
  and data. If there are none, the stage is not deterministic.
* On another kind of machine no digests are compared, only accuracy and curve; nothing drifts.
* Speed and memory are compared on an equal machine with at least `MIN_RUNS` stored runs, else
  noted. Much more memory fails; much lower speed fails only if the digest differs, too.
* An unfinished run fails at the stage where it stopped; without a baseline, a finished run drifts.

Promises: equal measurements give equal verdicts.
"""

import math
import re
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from flows.nightly.measurement import Measurement, Observed, accepted, read_baseline, write_baseline
from flows.recipe.recipe import Recipe, load_recipe
from infra.errors import ConfigError
from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes
from infra.store.stage_spec import some
from tasks.runner.earlier_work import differing

BASELINES = Path(__file__).resolve().parents[1] / "baselines"
NIGHT_JSON = "night.json"
NUM_KEPT = 7
"""Number of nights whose directories are kept."""
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")

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
    """How a recipe's night compares with its baseline."""

    recipe: str
    word: Word
    stage: str = ""
    """The first stage that failed, or else drifted; empty if no stage did."""
    drifted: str = ""
    """The first stage whose digest is not the stored one; empty if none or not compared."""
    causes: tuple[str, ...] = ()
    """Differences in the inputs of the drifted stage."""
    problems: tuple[str, ...] = ()
    """Reasons of a failure."""
    notes: tuple[str, ...] = ()


def judge(baseline: Measurement | None, tonight: Measurement) -> Verdict:
    """Compare a recipe's night with its baseline; None means that no baseline is stored."""
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
    """Yield a text for accuracy and for curve, if it is outside the spread of earlier runs."""
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
            yield (
                f"curve {value:.4g} in stretch {number + 1} of {NUM_STRETCHES}, "
                f"stored {_span(means)}, room {room:.2g}"
            )
            return


def _resources_beyond(before: Sequence[Observed], now: Observed) -> Iterator[tuple[str, bool]]:
    """Yield a text for speed and for memory, if beyond all earlier runs' room; True for speed."""
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


class Outcome(FrozenModel):
    """Measurement and verdict of one recipe in a night."""

    measurement: Measurement
    verdict: Verdict


class Night(FrozenModel):
    """Content of `night.json`."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[str]:
        """Names of the recipes that failed."""
        return [each.verdict.recipe for each in self.outcomes if each.verdict.word == "fail"]


def load_matrix(recipes: Sequence[str]) -> list[Recipe]:
    """Load the recipes of a night, by shipped name or YAML file.

    Raises:
        ConfigError: a recipe is invalid, or two have the same name.
    """
    loaded = [load_recipe(each) for each in recipes]
    names = [recipe.name for recipe in loaded]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError("recipes", f"got {sorted(twice)[0]!r} twice; need names that differ")
    return loaded


def nights_of(home: Path) -> Path:
    """Return the directory of the nights of a home."""
    return home / "nightly"


def afresh(recipe: Recipe, night: Path) -> Recipe:
    """Return the recipe with the night's home and database, and a store of its own.

    Its registered model gets the recipe's name, because an incumbent of another recipe would have
    its files in another store.
    """
    place = {
        "home": str(night),
        "store": str(night / "stores" / recipe.name),
        "tracking_uri": f"sqlite:///{night / 'mlflow.db'}",
    }
    location = recipe.location.model_copy(update=place)
    promote = recipe.promote.model_copy(update={"model_name": recipe.name})
    return recipe.model_copy(update={"location": location, "promote": promote})


def open_night(home: Path, name: str) -> Path:
    """Create a night's directory, or reuse it in a retry, and remove directories of old nights."""
    nights = nights_of(home)
    (nights / name).mkdir(parents=True, exist_ok=True)
    for old in sorted(path for path in nights.iterdir() if _NAME.fullmatch(path.name))[:-NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return nights / name


def keep_night(directory: Path, night: Night) -> None:
    """Write `night.json`."""
    atomic_write_bytes(directory / NIGHT_JSON, night.model_dump_json(indent=1).encode())


def last_night(home: Path) -> Night:
    """Read the newest night; if it was interrupted, it has only the recipes that finished.

    Raises:
        ConfigError: there is no night, or it is damaged.
    """
    found = sorted(nights_of(home).glob(f"*/{NIGHT_JSON}"))
    if not found:
        raise ConfigError("--accept", f"no night in {nights_of(home)}; run `rlhf nightly` first")
    try:
        return Night.model_validate_json(found[-1].read_bytes())
    except ValidationError as error:
        raise ConfigError(str(found[-1]), f"damaged: {error.errors()[0]['msg']}") from None


def accept(night: Night, recipes: Sequence[str], baselines: Path) -> list[Path]:
    """Accept a night's results as baselines; return their paths.

    Args:
        recipes: names; empty for all of the night.

    Raises:
        ConfigError: a recipe is not in the night, or did not finish.
    """
    found = {each.measurement.recipe: each.measurement for each in night.outcomes}
    for name in recipes or found:
        if name not in found:
            raise ConfigError("recipes", f"got {name!r}; night {night.name} has {', '.join(found)}")
        if problem := found[name].problem:
            raise ConfigError("--accept", f"{name} stopped at {found[name].stopped_at}: {problem}")
    return [
        write_baseline(baselines, accepted(read_baseline(baselines, name), found[name]))
        for name in recipes or found
    ]
