"""What is needed in a store: by runs, by aliases of gates, and by active attempts.

Promises: everything that a kept or possibly active run used or read is needed; so are the inputs of
a possibly active attempt, even if a path names the store's own files.
Does not promise: to detect dead runs. A run counts as active for `YOUNG_S` after anything of it was
written, so its end, or a pause between two of its stages, changes nothing at once.
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
"""What was used more recently stays despite all limits, since its user may be active."""
Log = Sequence[LogEntry] | None  # None: the log is damaged


@dataclass(frozen=True)
class Needs:
    """Reasons for people, by key of a run or by digest, why parts of a store are needed.

    `read_at` is when a run last read an artifact that none of its stages made, by digest; seconds
    since the epoch.
    """

    runs: Sequence[KnownRun]
    of_runs: Mapping[str, str]
    of_artifacts: Mapping[str, str]
    read_at: Mapping[str, float]

    def touched_at(self, digest: str, stored: Stored) -> float:
        """Return when a copy of an artifact was last written or read; seconds since the epoch."""
        return max(stored.touched_at, self.read_at.get(digest, 0.0))


def is_done(log: Log) -> bool:
    """Return True if a stage is committed and no new attempt works on it."""
    return bool(log) and log[-1].kind == "committed"


def needs_of(
    storage: Storage,
    runs: Sequence[KnownRun],
    stages: Mapping[str, StoredStage],
    logs: Mapping[str, Log],
    now: float,
) -> Needs:
    """Return what is needed, except by aliases; `OSError` if the store cannot be read."""
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
    """Return the reasons by run key; heartbeats and follower files show that a run is active."""
    found: dict[str, str] = {}
    for run in runs:
        signs = [stages[each].touched_at for each in run.used_at if each in stages]
        if run.kept:
            found[run.key] = f"run {run.name} is kept"
        elif now - max(run.spoke_at, *signs, 0.0) <= YOUNG_S:
            found[run.key] = f"run {run.name} may be at work"
    return found


def _promoted(storage: Storage, logs: Iterable[Log]) -> dict[str, str]:
    """Return the last champions and challengers by digest, which a registry may still offer."""
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
            continue  # the model of this decision is unknown
        if decision.given_alias:
            newest[f"{decision.model_name}@{decision.given_alias}"] = decision.model_digest
    return {digest: f"last {alias} of a gate" for alias, digest in newest.items()}


def _being_read(
    storage: Storage, logs: Mapping[str, Log], stages: Mapping[str, StoredStage], now: float
) -> dict[str, str]:
    """Return by digest the inputs of possibly active stages and of those that follow in a job."""
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
    for one in spec.inputs.values():
        yield spec.stage, _digest(one)
    if spec.then is not None:
        yield from _inputs(spec.then.spec)


def _digest(given: Artifact) -> str:
    """Return the digest of an input; a path outside the pipeline may point into a store."""
    inside = digest_in_path(given.uri) if given.kind == EXTERNAL_KIND else None
    return inside or given.digest
