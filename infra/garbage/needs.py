"""Who needs what of a store: runs, the aliases of gates, and attempts that live.

Promises: what a run that is kept, or may be at work, used or said that it reads is needed; so is
what an attempt that may be at work reads, even where its path names the store's own files.
Does not promise: to tell who is dead. A run counts as at work for `YOUNG_S` after anything of it
was written to, so that its end, and a pause between two stages of it, change nothing at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra.errors import ArtifactError, ConfigError
from infra.store.artifacts import EXTERNAL_KIND, digest_in_path
from infra.store.inventory import Stored, StoredStage
from infra.store.runs import KnownRun
from infra.store.stage_log import LogEntry
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import Storage
from infra.tracking.promotion import PROMOTION, Decision

DAY_S = 24 * 3600.0
YOUNG_S = DAY_S
"""What was used since then stays, whatever the limits: its user may just be at work."""
Log = Sequence[LogEntry] | None
"""None of a stage whose log is damaged."""


@dataclass(frozen=True)
class Needs:
    """Who needs what.

    Attributes:
        runs: all that the store knows.
        of_runs: by the runs' keys, why they need all that they used and read; not of every run.
        of_artifacts: by digest, why an artifact is needed.
        read_at: by digest, when a run last said that it reads an artifact that no stage of it
            made; seconds since the epoch.
    """

    runs: Sequence[KnownRun]
    of_runs: Mapping[str, str]
    of_artifacts: Mapping[str, str]
    read_at: Mapping[str, float]

    def touched_at(self, digest: str, stored: Stored) -> float:
        """When a copy of an artifact was last written or read; seconds since the epoch."""
        return max(stored.touched_at, self.read_at.get(digest, 0.0))


def is_done(log: Log) -> bool:
    """Whether a stage is committed, and nobody works on it anew."""
    return bool(log) and log[-1].kind == "committed"


def needs_of(
    storage: Storage,
    runs: Sequence[KnownRun],
    stages: Mapping[str, StoredStage],
    logs: Mapping[str, Log],
    now: float,
) -> Needs:
    """Who needs what, but for aliases of a registry.

    Args:
        storage: of the promotions and specifications.
        runs: that it knows.
        stages: that it has.
        logs: of those stages.
        now: in seconds since the epoch.

    Returns:
        All of it.

    Raises:
        OSError: the store cannot be read.
    """
    of_runs = _needing(runs, stages, now)
    reads = [(run, digest, at) for run in runs for digest, at in run.read_at.items()]
    of_artifacts = {
        **_promoted(storage, logs.values()),
        **_being_read(storage, logs, stages, now),
        **{digest: of_runs[run.key] for run, digest, _ in reads if run.key in of_runs},
    }
    read_at = {digest: at for _, digest, at in sorted(reads, key=lambda read: read[2])}
    return Needs(runs, of_runs, of_artifacts, read_at)


def _needing(
    runs: Iterable[KnownRun], stages: Mapping[str, StoredStage], now: float
) -> dict[str, str]:
    """Why runs need all that they used and read, by their keys.

    A job beats, and whoever waits for it says so again and again; both write to its stage.
    """
    found: dict[str, str] = {}
    for run in runs:
        signs = [stages[each].touched_at for each in run.used_at if each in stages]
        if run.kept:
            found[run.key] = f"run {run.name} is kept"
        elif now - max(run.spoke_at, *signs, 0.0) <= YOUNG_S:
            found[run.key] = f"run {run.name} may be at work"
    return found


def _promoted(storage: Storage, logs: Iterable[Log]) -> dict[str, str]:
    """Last champions and challengers, by digest: a registry elsewhere may still offer them."""
    records = [
        entry.record
        for log in logs
        for entry in log or ()
        if entry.record is not None and entry.record.artifact.kind == PROMOTION
    ]
    newest: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record.committed_at):
        try:
            decision = Decision.read(storage.local_copy(record.artifact))
        except ArtifactError:
            continue  # then it is not known which model it was
        if decision.given_alias:
            newest[f"{decision.model_name}@{decision.given_alias}"] = decision.model_digest
    return {digest: f"last {alias} of a gate" for alias, digest in newest.items()}


def _being_read(
    storage: Storage, logs: Mapping[str, Log], stages: Mapping[str, StoredStage], now: float
) -> dict[str, str]:
    """What stages read that may be at work, and what their jobs go on with, by digest."""
    found: dict[str, str] = {}
    for fingerprint, log in logs.items():
        if not log or is_done(log) or now - stages[fingerprint].work.touched_at > YOUNG_S:
            continue
        try:
            spec = storage.channel(fingerprint).read_specification(log[-1].number)
        except ConfigError:
            continue  # nothing was submitted
        found |= {digest: f"{name} reads it" for name, digest in _inputs(spec)}
    return found


def _inputs(spec: StageSpec) -> Iterator[tuple[str, str]]:
    """Stages and the digests that they read: of a job's stage, and of those that follow in it."""
    for one in spec.inputs.values():
        yield spec.stage, _digest(one)
    if spec.then is not None:
        yield from _inputs(spec.then.spec)


def _digest(given: Artifact) -> str:
    """What a path outside the pipeline names may lie in a store after all."""
    inside = digest_in_path(given.uri) if given.kind == EXTERNAL_KIND else None
    return inside or given.digest
