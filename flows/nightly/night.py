"""One night: its directory, and how its results are stored and accepted.

    <home>/nightly/<night>/                a home of its own, with Ray, MLflow and reports
    <home>/nightly/<night>/stores/<recipe> a store for each recipe
    <home>/nightly/<night>/night.json      measurements and verdicts; night.md and plots beside it

A night shares no store, tracking server or registry with ordinary runs or other nights.
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
"""Number of nights whose directories are kept."""
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")


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
            known = ", ".join(found)
            raise ConfigError("recipes", f"got {name!r}; night {night.name} has {known}")
        if problem := found[name].problem:
            raise ConfigError("--accept", f"{name} stopped at {found[name].stopped_at}: {problem}")
    return [
        write_baseline(baselines, accepted(read_baseline(baselines, name), found[name]))
        for name in recipes or found
    ]
