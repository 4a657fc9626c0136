"""One night: where it computes, what was found, how it is kept and taken for right.

    <home>/nightly/<night>/                a home of its own, with Ray, MLflow and reports
    <home>/nightly/<night>/stores/<recipe> a store of its own for each recipe
    <home>/nightly/<night>/night.json      measurements and verdicts; night.md and plots beside it

Promises: nothing of ordinary runs is reused, read or touched, nor anything of another recipe or
night: no store, no tracking server, no registry.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from flows.nightly.measurement import Measurement, accepted, read_baseline, write_baseline
from flows.nightly.verdict import Verdict
from flows.recipe.recipe import Recipe, load_recipe
from infra.errors import ConfigError
from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes

BASELINES = Path(__file__).resolve().parents[1] / "baselines"
NIGHT_JSON = "night.json"
NUM_KEPT = 7
"""Nights whose stores are kept."""
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")


class Outcome(FrozenModel):
    """Measurement and verdict of one recipe in a night."""

    measurement: Measurement
    verdict: Verdict


class Night(FrozenModel):
    """`night.json`."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[str]:
        """Recipes that failed."""
        return [each.verdict.recipe for each in self.outcomes if each.verdict.word == "fail"]


def load_matrix(recipes: Sequence[str]) -> list[Recipe]:
    """The recipes of a night.

    Args:
        recipes: shipped names, or YAML files.

    Raises:
        ConfigError: one is not, or two have one name.
    """
    loaded = [load_recipe(each) for each in recipes]
    names = [recipe.name for recipe in loaded]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError("recipes", f"got {sorted(twice)[0]!r} twice; need names that differ")
    return loaded


def nights_of(home: Path) -> Path:
    """Directory of the nights of a home."""
    return home / "nightly"


def afresh(recipe: Recipe, night: Path) -> Recipe:
    """A recipe that finds nothing where it runs.

    Args:
        night: directory of the night.

    Returns:
        The same recipe in another place. Its model bears its name there: of two recipes that call
        theirs alike, the second could not read the first one's champion.
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
    """Make a night's directory, and remove those of nights long gone.

    Args:
        name: time and a part of the flow run's id: a retry goes on with its night.
    """
    nights = nights_of(home)
    (nights / name).mkdir(parents=True, exist_ok=True)
    for old in sorted(path for path in nights.iterdir() if _NAME.fullmatch(path.name))[:-NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return nights / name


def keep_night(directory: Path, night: Night) -> None:
    """Write what a night found."""
    atomic_write_bytes(directory / NIGHT_JSON, night.model_dump_json(indent=1).encode())


def last_night(home: Path) -> Night:
    """The newest night that finished a recipe; of one that was ended early, those it finished.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    found = sorted(nights_of(home).glob(f"*/{NIGHT_JSON}"))
    if not found:
        raise ConfigError("--accept", f"no night in {nights_of(home)}; run `rlhf nightly` first")
    try:
        return Night.model_validate_json(found[-1].read_bytes())
    except ValidationError as error:
        raise ConfigError(str(found[-1]), f"damaged: {error.errors()[0]['msg']}") from None


def accept(night: Night, recipes: Sequence[str], baselines: Path) -> list[Path]:
    """Take a night's results for right.

    Args:
        recipes: names; empty for all of the night.

    Raises:
        ConfigError: a recipe is not of the night, or did not come to its end.
    """
    found = {each.measurement.recipe: each.measurement for each in night.outcomes}
    for name in recipes or found:
        if name not in found:
            known = ", ".join(found)
            raise ConfigError("recipes", f"got {name!r}; night {night.name} has {known}")
        if problem := found[name].problem:
            raise ConfigError("--accept", f"{name} stopped at {found[name].stopped_at}: {problem}")
    return [
        write_baseline(baselines, accepted(read_baseline(baselines, name), found[name]))
        for name in recipes or found
    ]
