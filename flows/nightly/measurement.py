"""Measurements of a recipe, of one night or of a baseline.

A baseline covers several runs and is under version control as `<baselines>/<recipe>.json`. Its
digests and their inputs are those of the newest run; its measured values are those of all runs.
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
"""Number of runs that a baseline keeps; older ones are dropped."""


class Machine(FrozenModel):
    """Machine of a run, as far as it can change results or speed."""

    platform: str
    device_kind: str
    processor: str
    """Processor of the host of the driver; nodes of a cluster are not inspected."""
    num_cores: int
    memory_gib: int
    system: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Values that must be equal for digests to be compared."""
        return (self.platform, self.device_kind, self.processor, self.system)

    def __str__(self) -> str:
        return f"{self.platform} {self.device_kind}, {self.processor}, {self.system}"


class Made(FrozenModel):
    """Output of a stage, and its inputs besides outputs of other stages."""

    digest: str
    settings: str
    """sha256 of the settings that can change a result."""
    sources: str
    """The first stage with the same sources; a key of `Measurement.sources`."""
    libraries: dict[str, str | None]
    """Versions by distribution, and of Python."""
    data: dict[str, str] = {}
    """Digests of inputs from outside the pipeline."""


class Observed(FrozenModel):
    """Measured values of a stage in one run; missing ones are empty or None."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    curve: tuple[float, ...] = ()
    """Mean reward of each RL step, or loss of each supervised step."""
    accuracy: float | None = None
    accuracy_room: float = 0.0
    """Half the width of the 95 % confidence interval."""
    tokens_per_s: float | None = None
    """Median over the steps, per rank."""
    peak_bytes: float | None = None
    """Peak memory, as the training engine reports it."""


class Run(FrozenModel):
    """Measured values of one night."""

    night: str
    stages: dict[str, Observed]


class Measurement(FrozenModel):
    """Inputs, outputs and measured values of one recipe."""

    schema_version: int = 1
    recipe: str
    machine: Machine
    settings: dict[str, Any]
    """Settings that can change a result, by dotted path."""
    stages: dict[str, Made]
    """Stages in order; the digest of an unfinished one is empty."""
    sources: dict[str, dict[str, str]]
    """sha256 (16 digits) by file, for each group of stages with the same sources."""
    runs: tuple[Run, ...]
    """Oldest first."""
    stopped_at: str = ""
    """Label of the stage that did not finish; empty if all did."""
    problem: str = ""


def read_baseline(directory: Path, recipe: str) -> Measurement | None:
    """Read the baseline of a recipe; None if there is none.

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
    """Write a baseline and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{measurement.recipe}.json"
    atomic_write_bytes(path, json.dumps(measurement.model_dump(mode="json"), indent=1).encode())
    return path


def accepted(baseline: Measurement | None, tonight: Measurement) -> Measurement:
    """Return the baseline that results when a finished night is accepted.

    The earlier runs stay in it if settings, data and machine are the same.
    """
    if baseline is None or not _is_alike(baseline, tonight):
        return tonight
    nights = {run.night: run for run in (*baseline.runs, *tonight.runs)}
    return tonight.model_copy(update={"runs": tuple(nights.values())[-MAX_RUNS:]})


def _is_alike(one: Measurement, other: Measurement) -> bool:
    data = [{name: made.data for name, made in each.stages.items()} for each in (one, other)]
    return (one.machine, one.settings, data[0]) == (other.machine, other.settings, data[1])


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one with dotted paths."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flattened(value, f"{path}{name}.") if isinstance(value, dict) and value else None
        flat |= inner or {f"{path}{name}": value}
    return flat
