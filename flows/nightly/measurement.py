"""Measurements of a recipe: those of one night, and those of a baseline.

A baseline is a measurement of several runs, under version control as `<baselines>/<recipe>.json`:
digests and what they were made from are those of its newest run, the figures are of all of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from infra.errors import ConfigError
from infra.field_errors import to_config_error
from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes

MAX_RUNS = 10
"""Runs that a baseline keeps; older ones are dropped."""


class Machine(FrozenModel):
    """Machine of a run, as far as it can change numbers or speed."""

    platform: str
    device_kind: str
    processor: str
    """Processor of the host that asks; nodes of a cluster are not looked at."""
    num_cores: int
    memory_gib: int
    system: str
    """Operating system and architecture."""

    @property
    def kind(self) -> tuple[str, ...]:
        """Values that must be equal for digests to be compared."""
        return (self.platform, self.device_kind, self.processor, self.system)

    def __str__(self) -> str:
        return f"{self.platform} {self.device_kind}, {self.processor}, {self.system}"


class Made(FrozenModel):
    """Output of a stage, and what it was made from besides outputs of other stages."""

    digest: str
    settings: str
    """sha256 of those that count."""
    sources: str
    """The first stage that ran the same sources: a key of `Measurement.sources`."""
    libraries: dict[str, str | None]
    """Versions by distribution, and of Python."""
    data: dict[str, str] = {}
    """Digests of what it read from outside the pipeline."""


class Observed(FrozenModel):
    """The figures of a stage in one run; what it does not have is empty or None."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    curve: tuple[float, ...] = ()
    """Mean reward of each RL step, or loss of each supervised one."""
    accuracy: float | None = None
    accuracy_room: float = 0.0
    """Half the width of its own 95 % interval."""
    tokens_per_s: float | None = None
    """Median over the steps, of one rank."""
    peak_bytes: float | None = None
    """Memory, as the training engine reports it."""


class Run(FrozenModel):
    """One night's figures."""

    night: str
    stages: dict[str, Observed]


class Measurement(FrozenModel):
    """One recipe: where, from what, and what came out."""

    schema_version: int = 1
    recipe: str
    machine: Machine
    settings: dict[str, Any]
    """Settings that can change a number, by dotted path."""
    stages: dict[str, Made]
    """Stages in order; the digest of an unfinished one is empty."""
    sources: dict[str, dict[str, str]]
    """sha256 (16 digits) by file, of what each stage reaches."""
    runs: tuple[Run, ...]
    """Oldest first."""
    stopped_at: str = ""
    """The stage that did not end; empty if all did."""
    problem: str = ""
    """Why, in one line."""


def read_baseline(directory: Path, recipe: str) -> Measurement | None:
    """Stored measurements of a recipe.

    Returns:
        The baseline; None if there is none.

    Raises:
        ConfigError: it is damaged.
    """
    path = directory / f"{recipe}.json"
    try:
        return Measurement.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise to_config_error(error, Measurement, str(path)) from None
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON ({error}); restore it") from None


def write_baseline(directory: Path, measurement: Measurement) -> Path:
    """Store what the next nights are compared with."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{measurement.recipe}.json"
    atomic_write_bytes(path, json.dumps(measurement.model_dump(mode="json"), indent=1).encode())
    return path


def accepted(baseline: Measurement | None, tonight: Measurement) -> Measurement:
    """Return the baseline after a night's result was accepted.

    Earlier runs stay part of the spread while the settings, the data and the machine are the same:
    figures of others say nothing about these.

    Args:
        baseline: before; None is none.
        tonight: a night that came to its end.
    """
    if baseline is None or not _is_alike(baseline, tonight):
        return tonight
    nights = {run.night: run for run in (*baseline.runs, *tonight.runs)}
    return tonight.model_copy(update={"runs": tuple(nights.values())[-MAX_RUNS:]})


def _is_alike(one: Measurement, other: Measurement) -> bool:
    data = [{name: made.data for name, made in each.stages.items()} for each in (one, other)]
    return (one.machine, one.settings, data[0]) == (other.machine, other.settings, data[1])


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flattened(value, f"{path}{name}.") if isinstance(value, dict) and value else None
        flat |= inner or {f"{path}{name}": value}
    return flat
