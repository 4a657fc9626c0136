"""Earlier work on a stage: how it differs from a request, and how it is continued.

An edited stage, or one with another layout, has a new fingerprint, under which the step checkpoints
of the earlier work are not found. Adoption starts a generation of the new stage with the newest
valid checkpoint of that work, and copies the metrics of its steps into the new journal.

Promises: an earlier run's specification is compared in configuration, seed, known digests of
inputs, source modules and the job's libraries. A difference in model, data, seed, algorithm,
optimizer or schedule prevents adoption; code, libraries and `Execution` fields may differ.
The earlier work is not changed, and its checkpoint is linked before anything is recorded, so that a
failure leaves the stage as it was.
Does not promise: differences of the device and of other distributions' code, which are not
recorded; that today's code would compute the adopted steps the same. Order of rows and seeds are
functions of (seed, step), so no row is skipped or repeated; random generators of ranks are restored
only if the number of ranks is the same.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engines.config.base import Change
from infra.errors import ArtifactError, ArtifactNotFoundError, ConfigError
from infra.field_errors import to_config_error
from infra.store.stage_log import latest_commit
from infra.store.stage_spec import Adoption, Artifact, StageSpec, some
from infra.store.step_directories import link_checkpoint, newest_valid
from infra.store.storage import Storage
from infra.tracking.journal import Journal, StageHistory, num_done, read_journal
from tasks.runner.run import STAGE_SCHEMA_VERSION, StageRequest

REFUSED = "a value that this version refuses"
UNNAMED = "the device, or code of other distributions"
DIGITS = 12
MAX_NUM_EARLIER = 256
"""Number of most recently used stages that `EarlierRuns` compares, to bound its time."""


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
    before = _values(spec.schema_version, spec.seed, spec.inputs)
    now = _values(STAGE_SCHEMA_VERSION, request.seed, request.inputs)
    changes = [
        Change(name, old, new, is_execution=False)
        for name, (old, new) in differing(before, now).items()
        if new != ""  # an empty digest is not known yet
    ]
    try:
        config = type(request.config).model_validate(spec.config)
    except ValidationError as error:
        path = to_config_error(error, type(request.config)).path
        changes.append(Change(path, REFUSED, "another value", is_execution=False))
    else:
        changes += request.config.changes(config)
    libraries = differing(spec.libraries, request.libraries)
    return Differences(
        changes=tuple(changes),
        sources=tuple(differing(spec.sources, request.sources)),
        libraries=tuple(f"{name} {old} -> {new}" for name, (old, new) in libraries.items()),
    )


@dataclass(frozen=True)
class EarlierRun:
    """A stage of an earlier run; `output` is None if it is half-trained."""

    spec: StageSpec
    output: Artifact | None
    differs: Differences

    def __str__(self) -> str:
        return f"differs from {self.spec.fingerprint[:DIGITS]}: {self.differs}"

    def distance(self) -> tuple[int, bool, int]:
        """Return the sort key of earlier runs; the smallest is the nearest."""
        sources_and_libraries = len(self.differs.sources) + len(self.differs.libraries)
        return len(self.differs.changes), self.output is None, sources_and_libraries


@dataclass
class EarlierRuns:
    """The committed and half-trained stages of a store, which is read once, on first use."""

    storage: Storage

    def nearest(self, request: StageRequest) -> EarlierRun | None:
        """Return the earlier run with the fewest changed values; None if no other one is known.

        Ties go to a committed run, then to fewer changed sources and libraries, then to the latest.
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
        return min(found, key=EarlierRun.distance, default=None)

    @cached_property
    def _known(self) -> list[tuple[StageSpec, Artifact | None]]:
        """Specifications and outputs, the last used first."""
        used_at: dict[str, float] = {}
        for run in self.storage.runs.known():
            for fingerprint, at in run.used_at.items():
                used_at[fingerprint] = max(at, used_at.get(fingerprint, at))
        half_trained = {*self.storage.with_steps()}
        known = []
        for fingerprint in nlargest(MAX_NUM_EARLIER, used_at, key=used_at.__getitem__):
            with suppress(ArtifactError):  # a lookup of that stage reports it
                record = latest_commit(self.storage.attempts.entries(fingerprint))
                spec = StageHistory(self.storage).specification(fingerprint)
                if spec is not None and (record is not None or fingerprint in half_trained):
                    known.append((spec, record.artifact if record else None))
        return known


def _values(schema_version: int, seed: int, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    digests = {f"inputs.{name}": each.digest[:DIGITS] for name, each in inputs.items()}
    return {"schema_version": schema_version, "seed": seed, **digests}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each name whose values differ; None if one is missing."""
    return {
        name: (before.get(name), now.get(name))
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    }


@dataclass(frozen=True)
class HalfTrained:
    """Uncommitted work on a stage under another fingerprint.

    Attributes:
        generation: number of its first attempt.
        step: newest checkpoint within the stage, not verified.
        differs: differences that do not prevent adoption.
        refused: differences that prevent adoption.
    """

    fingerprint: str
    generation: int
    root: Path
    step: int
    differs: tuple[str, ...]
    refused: tuple[Change, ...]

    def __str__(self) -> str:
        return f"step {self.step} of {self.fingerprint[:DIGITS]}"

    def offer(self, label: str) -> str:
        """Return text on whether the stage `label` can adopt this work; empty if inputs differ."""
        fields = [change.field for change in self.refused]
        if not fields:
            return (
                f"{self} can be adopted with --adopt {label}, in the order of data that it began "
                f"with; it differs in {some(self.differs)}"
            )
        alien = any(field.startswith("inputs.") for field in fields)
        return (
            "" if alien else f"{self} cannot be adopted; it was trained with other {some(fields)}"
        )


def half_trained(storage: Storage, request: StageRequest) -> list[HalfTrained]:
    """Return half-trained work ahead of the stage's own, by fewest refusals, then last step."""
    at = own_step(storage, request)
    ahead = [
        work
        for fingerprint in storage.with_steps()
        if fingerprint != request.fingerprint
        and (work := _work(storage, fingerprint, request))
        and work.step > at
    ]
    return sorted(ahead, key=lambda work: (len(work.refused), -work.step))


def own_step(storage: Storage, request: StageRequest) -> int:
    """Return the newest step checkpoint of a stage's uncommitted work; 0 without one."""
    own = _open_generation(storage, request.fingerprint)
    return max(_told_steps(storage, request.fingerprint, *own), default=0) if own else 0


def find_adoptable(storage: Storage, request: StageRequest) -> HalfTrained | None:
    """Return the work that `--adopt` continues; None if the stage's own is at least as far.

    Raises:
        ConfigError: neither exists, or the work trains something else; names the field.
    """
    found = half_trained(storage, request)
    if not found:
        if own_step(storage, request):
            return None
        raise ConfigError(
            "--adopt",
            f"got {request.label!r}; need half-trained work on it under another fingerprint, and "
            f"{storage.uri} has none; run without --adopt {request.label}",
        )
    if found[0].refused:
        first, *more = found[0].refused
        also = f"; {', '.join(change.field for change in more)} differ, too" if more else ""
        raise ConfigError(
            first.field,
            f"got {first.now}; need {first.before}, with which {found[0]} was trained{also}; "
            f"{'' if first.before is REFUSED else 'set it back, or '}run without --adopt "
            f"{request.label}",
        )
    return found[0]


def link_adopted(work: HalfTrained, storage: Storage, fingerprint: str, attempt: int) -> Adoption:
    """Link the work's newest valid checkpoint for `attempt`; return the adoption to log.

    A checkpoint beyond the last step in the work's journal is ignored, because it has no metrics.
    The attempt need not be held.

    Raises:
        ArtifactError: the work has no valid checkpoint any more.
    """
    last = _num_told(storage, work.fingerprint, work.generation)
    storage.channel(work.fingerprint).fetch_steps(work.root, last)
    newest = newest_valid(work.root, last)
    if newest is None:
        raise ArtifactNotFoundError(
            f"the checkpoints in {work.root} are gone, up to step {last}, the last in its journal"
        )
    step, path, digest = newest
    adopted = Adoption(
        fingerprint=work.fingerprint,
        generation=work.generation,
        step=step,
        digest=digest,
        differs=work.differs,
    )
    channel = storage.channel(fingerprint)
    steps = channel.steps_dir(attempt, adopted)
    link_checkpoint(path, steps)
    channel.ship_steps(steps)
    return adopted


def copy_adopted_steps(
    storage: Storage, request: StageRequest, adopted: Adoption, attempt: int, is_first: bool
) -> None:
    """Copy the metrics of adopted steps into an attempt's journal, if missing.

    The caller holds the attempt, which has no job yet. `is_first`: it begins its generation.
    """
    last = request.config.num_previous_steps + adopted.step
    theirs, _ = read_journal(storage, adopted.fingerprint, attempt=adopted.generation)
    mine, _ = read_journal(storage, request.fingerprint)
    path = storage.channel(request.fingerprint).local_dir(attempt) / "journal.jsonl"
    with Journal(path, mine) as journal:
        journal.copy(each for each in theirs if each.step is not None and each.step <= last)
        if is_first:
            journal.log(f"adopted {adopted}")


def _work(storage: Storage, fingerprint: str, request: StageRequest) -> HalfTrained | None:
    """Return a fingerprint's work, if it is half-trained and on the requested stage."""
    work = _open_generation(storage, fingerprint)
    spec = StageHistory(storage).specification(fingerprint)
    if work is None or spec is None or spec.stage != request.config.stage:
        return None
    found = differences(spec, request)
    if any(change.field == "round" for change in found.changes):
        return None
    steps = _told_steps(storage, fingerprint, *work)
    if not steps:
        return None
    differs = (
        *(str(change) for change in found.changes if change.is_execution),
        *found.sources,
        *found.libraries,
    )
    refused = tuple(change for change in found.changes if not change.is_execution)
    return HalfTrained(fingerprint, *work, max(steps), differs or (UNNAMED,), refused)


def _told_steps(storage: Storage, fingerprint: str, number: int, root: Path) -> list[int]:
    """Return step checkpoints of a generation that can be continued, without reading them."""
    steps = storage.channel(fingerprint).step_numbers(root)
    last = _num_told(storage, fingerprint, number) if steps else 0
    return [step for step in steps if step <= last]


def _num_told(storage: Storage, fingerprint: str, number: int) -> int:
    records, _ = read_journal(storage, fingerprint, attempt=number)
    return num_done(records, storage.attempts.generation(fingerprint, number)[0].adopted)


def _open_generation(storage: Storage, fingerprint: str) -> tuple[int, Path] | None:
    """Return number and checkpoint directory of the newest generation, if it is not committed."""
    members = storage.attempts.generation(fingerprint)
    if not members or members[-1].kind == "committed":
        return None
    number = members[0].number
    return number, storage.channel(fingerprint).steps_dir(number, members[0].adopted)
