"""Reads the results of a recipe's stages from a store, after its flow ended or stopped.

Promises: the reported sources, libraries and settings of a stage are those of its fingerprint,
because the process that ran the stages builds the same stage requests again.
"""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from engines.config.recipe import NOT_IDENTITY, Recipe
from flows.nightly.measurement import Machine, Made, Measurement, Observed, Run, flattened
from flows.run.registry import RoundGate
from flows.stage_order import run_stages
from infra.errors import PipelineError
from infra.identity.fingerprint import module_file
from infra.identity.imported_code import SCRIPT_KIND
from infra.store.artifacts import EXTERNAL_KIND
from infra.store.canonical import sha256_json
from infra.store.stage_spec import CommitRecord
from infra.store.storage import open_storage
from infra.tracking.history import StageHistory
from infra.tracking.journal import JournalRecord
from tasks.runner.identity import StageRequest
from tasks.runner.run import StageResult

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
        recipe: with a store of its own.
        problem: why the run ended early; empty if it did not.
    """
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
        machine=this_machine(recipe),
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


def this_machine(recipe: Recipe) -> Machine:
    """Return this machine and the device that a recipe computes on, as `preflight` resolved it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return Machine(
        platform=recipe.hardware.platform,
        device_kind=recipe.hardware.device_kind or "",
        processor=processor,
        num_cores=os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        system=f"{platform.system()} {platform.machine()}",
    )


class _Reader:
    """A `tasks.runner.run.StageRunner` that runs nothing and stops where nothing was committed."""

    def __init__(self, history: StageHistory, seed: int) -> None:
        self.seed = seed
        self._history = history
        self.made: dict[str, Made] = {}
        self.observed: dict[str, Observed] = {}
        self.sources: dict[str, dict[str, str]] = {}

    def run(self, request: StageRequest) -> StageResult:
        """Read one stage.

        Raises:
            StoppedError: the stage has no output.
        """
        record = self._history.storage.lookup(request.fingerprint)
        self.made[request.label] = self._made(request, record)
        if record is None:
            raise StoppedError(request.label)
        journal, _ = self._history.records(request.fingerprint, "")
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
