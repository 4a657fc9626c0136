"""Differences between a stage and earlier runs, field by field.

Promises: compares everything in the specification of an earlier run: configuration, seed, digests
of inputs, source modules, libraries. Only specifications are read.
Does not promise: differences of the device and of other distributions' code, which are not
recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from typing import Any

from pydantic import ValidationError

from engines.config.base import Change
from infra.errors import ArtifactError, ConfigError
from infra.field_errors import to_config_error
from infra.store.stage_log import generation, latest_commit
from infra.store.stage_spec import Artifact, StageSpec, some
from infra.store.storage import Storage
from tasks.runner.identity import STAGE_SCHEMA_VERSION, StageRequest

UNNAMED = "the device, or code of other distributions"
DIGITS = 12
MAX_NUM_EARLIER = 256
"""Number of most recently used stages that are compared, which bounds the time of a plan."""


@dataclass(frozen=True)
class Differences:
    """Differences between an earlier run of a stage and a request."""

    changes: tuple[Change, ...]
    sources: tuple[str, ...]
    libraries: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.sources or self.libraries)

    def __str__(self) -> str:
        parts = [some([str(change) for change in self.changes])]
        parts += [f"sources {some(self.sources)}"] if self.sources else []
        parts += [f"libraries {some(self.libraries)}"] if self.libraries else []
        return "; ".join(filter(None, parts)) or UNNAMED


def differences(spec: StageSpec, request: StageRequest) -> Differences:
    """Compare a request with an attempt's specification; inputs without a digest are skipped."""
    libraries = _differing(spec.libraries, request.libraries)
    return Differences(
        changes=tuple(_changes(spec, request)),
        sources=tuple(_differing(spec.sources, request.sources)),
        libraries=tuple(f"{name} {old} -> {new}" for name, (old, new) in libraries.items()),
    )


def specification(storage: Storage, fingerprint: str) -> StageSpec | None:
    """Return the specification of the stage's newest generation; None if none can be read."""
    for entry in generation(storage.attempts.entries(fingerprint)):
        try:
            return storage.channel(fingerprint).read_specification(entry.number)
        except ConfigError:
            continue  # the attempt died before writing it, or newer code wrote it
    return None


@dataclass(frozen=True)
class EarlierRun:
    """A stage of an earlier run; `output` is None if it is half-trained."""

    spec: StageSpec
    output: Artifact | None
    differs: Differences

    def __str__(self) -> str:
        return f"differs from {self.spec.fingerprint[:DIGITS]}: {self.differs}"


class EarlierRuns:
    """The committed and half-trained stages of a store; it is read once, on first use."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def nearest(self, request: StageRequest) -> EarlierRun | None:
        """Return the earlier run with the fewest differences; None if the stage was never run.

        Of equals, a committed one is preferred, then the latest.
        """
        known = all(artifact.digest for artifact in request.inputs.values())
        own = request.fingerprint if known else None
        found = [
            EarlierRun(spec, output, differences(spec, request))
            for spec, output in self._known
            if spec.stage == request.config.stage
            and spec.fingerprint != own
            and type(request.config).model_construct(**spec.config).label == request.label
        ]
        return min(found, key=_distance, default=None)

    @cached_property
    def _known(self) -> list[tuple[StageSpec, Artifact | None]]:
        """Specifications and outputs, the last used first."""
        used_at: dict[str, float] = {}
        for run in self._storage.runs.known():
            for fingerprint, at in run.used_at.items():
                used_at[fingerprint] = max(at, used_at.get(fingerprint, at))
        half_trained = {*self._storage.with_steps()}
        known = []
        for fingerprint in nlargest(MAX_NUM_EARLIER, used_at, key=used_at.__getitem__):
            with suppress(ArtifactError):  # a lookup of that stage reports it
                record = latest_commit(self._storage.attempts.entries(fingerprint))
                spec = specification(self._storage, fingerprint)
                if spec is not None and (record is not None or fingerprint in half_trained):
                    known.append((spec, record.artifact if record else None))
        return known


def _distance(run: EarlierRun) -> tuple[int, bool, int]:
    differs = run.differs
    return len(differs.changes), run.output is None, len(differs.sources) + len(differs.libraries)


def _changes(spec: StageSpec, request: StageRequest) -> Iterator[Change]:
    before = _values(spec.schema_version, spec.seed, spec.inputs)
    now = _values(STAGE_SCHEMA_VERSION, request.seed, request.inputs)
    for name, (old, new) in _differing(before, now).items():
        if new != "":  # an empty digest is not known yet
            yield Change(name, old, new, is_execution=False)
    try:
        config = type(request.config).model_validate(spec.config)
    except ValidationError as error:
        path = to_config_error(error, type(request.config)).path
        yield Change(path, "what the code of then took", "another form", is_execution=False)
    else:
        yield from request.config.changes(config)


def _values(schema_version: int, seed: int, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    digests = {f"inputs.{name}": each.digest[:DIGITS] for name, each in inputs.items()}
    return {"schema_version": schema_version, "seed": seed, **digests}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each name whose values differ; None if one is missing."""
    return {
        name: (before.get(name), now.get(name))
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    }
