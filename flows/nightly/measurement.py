"""Measure what a recipe produced in a night, and store measurements as baselines.

A night's measurement is read from the store after its flow ended or stopped. A baseline covers
several runs and is under version control as `<baselines>/<recipe>.json`. Its digests and their
inputs are those of the newest run; its measured values are those of all runs.
Promises: the reported sources, libraries and settings of a stage are those of its fingerprint,
because the process that ran the stages builds the same stage requests again.
"""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from engines.config.recipe import NOT_IDENTITY, Recipe
from flows.run.registry import RoundGate
from flows.stage_order import run_stages
from infra.errors import ConfigError, PipelineError
from infra.field_errors import to_config_error
from infra.frozen_model import FrozenModel
from infra.identity.fingerprint import module_file
from infra.identity.imported_code import SCRIPT_KIND
from infra.names import flattened
from infra.store.artifacts import EXTERNAL_KIND
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import sha256_json
from infra.store.stage_spec import CommitRecord
from infra.store.storage import open_storage
from infra.tracking.journal import JournalRecord, StageHistory
from tasks.runner.run import StageRequest, StageResult

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


class Observed(FrozenModel, ser_json_inf_nan="strings"):
    """Measured values of a stage in one run; missing ones are empty, None or 0."""

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
    """Label of the stage that did not finish, or `WHOLE_RUN`; empty if all did."""
    problem: str = ""


def read_baseline(directory: Path, recipe: str) -> Measurement | None:
    """Read the baseline of a recipe; None if there is none, `ConfigError` if it is damaged."""
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

    def given(each: Measurement) -> tuple[Any, ...]:
        return each.machine, each.settings, {k: made.data for k, made in each.stages.items()}

    if baseline is None or given(baseline) != given(tonight):
        return tonight
    nights = {run.night: run for run in (*baseline.runs, *tonight.runs)}
    return tonight.model_copy(update={"runs": tuple(nights.values())[-MAX_RUNS:]})


ROOT = Path(__file__).resolve().parents[2]
CURVES = ("critic/score/mean", "train/loss")
SPEED, MEMORY = "perf/throughput", "perf/max_memory_allocated_gb"
SOURCE_DIGITS = 16
WHOLE_RUN = "the run"
"""Stage name for a run that stopped outside of its stages."""


class StoppedError(PipelineError):
    """A stage has no output because the run stopped there."""


def measure(recipe: Recipe, night: str, problem: str = "") -> Measurement:
    """Read from the store what the run of a recipe produced.

    Args:
        recipe: must have a store of its own, and its device as `preflight` resolved it.
        problem: why the run ended early; empty if it did not.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    history = StageHistory(open_storage(recipe.store_uri))
    reader, gate = _Reader(history, recipe.seed), RoundGate(recipe.diagnosis, history)
    stopped_at = WHOLE_RUN if problem else ""

    try:
        run_stages(recipe, reader, lambda _: None, gate.accepts)
    except StoppedError as stopped:
        stopped_at, problem = str(stopped), problem or "it has no output in the store"
    except PipelineError:
        if not problem:  # else reading fails with the error that ended the run
            raise
    return Measurement(
        recipe=recipe.name,
        machine=Machine(
            platform=recipe.hardware.platform,
            device_kind=recipe.hardware.device_kind or "",
            processor=next(names, platform.processor() or platform.machine()),
            num_cores=os.cpu_count() or 0,
            memory_gib=round(psutil.virtual_memory().total / 2**30),
            system=f"{platform.system()} {platform.machine()}",
        ),
        settings=flattened({**settings_of(recipe), "seed": recipe.seed}),
        stages=reader.made,
        sources=reader.sources,
        runs=(Run(night=night, stages=reader.observed),),
        stopped_at=stopped_at,
        problem=problem,
    )


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that can change a result."""
    values = {k: v for k, v in recipe.identity_values().items() if k not in NOT_IDENTITY}
    if recipe.rl.num_rounds:  # in RL rounds, rollouts that miss the deadline are not trained on
        values["rollout"] = {**values["rollout"], "timeout_s": recipe.rollout.timeout_s}
    return values


@dataclass(frozen=True)
class _Reader:
    """A `tasks.runner.run.StageRunner` that runs nothing and stops where nothing was committed."""

    history: StageHistory
    seed: int
    made: dict[str, Made] = field(default_factory=dict)
    observed: dict[str, Observed] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self, request: StageRequest) -> StageResult:
        """Read one stage; `StoppedError` if it has no output."""
        record = self.history.storage.lookup(request.fingerprint)
        self.made[request.label] = self._made(request, record)
        if record is None:
            raise StoppedError(request.label)
        journal, _ = self.history.records(request.fingerprint, "")
        self.observed[request.label] = observed(record, journal)
        return StageResult(
            label=request.label,
            fingerprint=request.fingerprint,
            artifact=record.artifact,
            reused=True,
            wall_s=0.0,
            metrics=record.metrics,
            job_seconds=record.seconds,
        )

    def _made(self, request: StageRequest, record: CommitRecord | None) -> Made:
        files = {_file(name): sha[:SOURCE_DIGITS] for name, sha in request.sources.items()}
        same = next((label for label, known in self.sources.items() if known == files), None)
        if same is None:
            self.sources[request.label] = files
        return Made(
            digest=record.artifact.digest if record else "",
            settings=sha256_json([request.config.identity_values(), request.seed]),
            sources=same or request.label,
            libraries={
                **request.libraries,
                **request.rollout_libraries,
                "python": ".".join(platform.python_version_tuple()[:2]),
            },
            data={
                name: given.digest
                for name, given in request.inputs.items()
                if given.kind in {EXTERNAL_KIND, SCRIPT_KIND}
            },
        )


def _file(module: str) -> str:
    path = module_file(module)
    return str(path.relative_to(ROOT)) if path and path.is_relative_to(ROOT) else module


def observed(record: CommitRecord, journal: Sequence[JournalRecord]) -> Observed:
    """Return the measured values of a stage; `journal` has the records of all its attempts."""

    def values(name: str) -> list[float]:
        points = {
            r.step: r.values[name] for r in journal if r.step is not None and name in r.values
        }
        return [points[step] for step in sorted(points)]

    curve = next((values(name) for name in CURVES if values(name)), [])
    speeds, peaks = values(SPEED), values(MEMORY)
    low, high = (record.metrics.get(f"accuracy_{end}", 0.0) for end in ("low", "high"))
    return Observed(
        curve=tuple(float(f"{value:.6g}") for value in curve),
        accuracy=record.metrics.get("accuracy"),
        accuracy_room=round((high - low) / 2, 6),
        tokens_per_s=round(statistics.median(speeds), 1) if speeds else None,
        peak_bytes=max(peaks) * 1e9 if peaks else None,
    )
