"""Garbage collection: what may be removed from a store, and its removal while others use the store.

A stage is kept while something needs it: a kept or possibly active run that used it, a possibly
active attempt that reads its output, or a promotion alias. Other stages are removed after a time
without use. Above a limit of bytes the least recently used are removed earlier, except unfinished
stages with checkpoints, which may be adopted. An artifact is removed with the last stage whose log
names it.

Promises: a survey does not change the store, and a stage with a damaged log stays. A stage's log is
removed first, so that it no longer counts as done; then its working files; then the artifacts that
no other log names. Just before each removal the records of use are read again (`infra.store.runs`),
to spare what became needed meanwhile. A kill at any moment leaves a working store, and the rest for
the next collection.
Does not promise: to detect dead runs. A run counts as active for `YOUNG_S` after the last write to
its records or stages. A stage without a recorded run counts as used when it was last written.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from infra.errors import ArtifactError, ConfigError
from infra.store.artifacts import EXTERNAL_KIND, digest_in_path
from infra.store.inventory import Inventory, Stored, StoredStage
from infra.store.runs import KnownRun
from infra.store.stage_log import LogEntry
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import Storage
from infra.tracking.promotion import PROMOTION, Decision

DAY_S = 24 * 3600.0
YOUNG_S = DAY_S
"""What was used within this time stays despite all limits, since its user may be active."""
Log = Sequence[LogEntry] | None  # None: the log is damaged


@dataclass(frozen=True)
class Needs:
    """Reasons, in words, why runs (by key) and artifacts (by digest) of a store are needed.

    `runs` are all known runs. `read_at` is when a run last read an artifact that none of its stages
    made, by digest, in seconds since the epoch.
    """

    runs: Sequence[KnownRun]
    of_runs: Mapping[str, str]
    of_artifacts: Mapping[str, str]
    read_at: Mapping[str, float]


@dataclass(frozen=True)
class Limits:
    """Unneeded stages go after `unused_s` without use (at least `YOUNG_S`) or above `max_bytes`."""

    unused_s: float = 30 * DAY_S
    max_bytes: int | None = None


@dataclass(frozen=True)
class SurveyedStage:
    """A stage and its working files; `needed_by` is the reason why it stays, or empty.

    `digests` are those of the artifacts that its log names. `used_at` is when it was last
    requested, read or written, in seconds since the epoch. An unknown `name` is empty.
    """

    fingerprint: str
    name: str
    digests: frozenset[str]
    log: Stored
    work: Stored
    used_at: float
    needed_by: str


@dataclass(frozen=True)
class Survey:
    """What a store contains at the time `at` (seconds since the epoch).

    `goes`, `artifacts` and `rests` are to be removed: stages (the longest unused first), artifacts
    that no staying stage names, and files of dead writers or step checkpoints of finished stages.
    `runs` were read first; `total_bytes` excludes the records of runs.
    """

    goes: tuple[SurveyedStage, ...]
    stays: tuple[SurveyedStage, ...]
    artifacts: tuple[tuple[str, Stored], ...]
    rests: tuple[Stored, ...]
    total_bytes: int
    runs: tuple[KnownRun, ...]
    at: float

    @property
    def freed_bytes(self) -> int:
        """Bytes of everything in `goes`, `artifacts` and `rests`."""
        return sum(
            (
                *(stage.log.size_bytes + stage.work.size_bytes for stage in self.goes),
                *(stored.size_bytes for _, stored in self.artifacts),
                *(stored.size_bytes for stored in self.rests),
            )
        )


def survey(
    storage: Storage, inventory: Inventory, aliased: Mapping[str, str], limits: Limits
) -> Survey:
    """Survey a store; `aliased` has the reason to keep each artifact with an alias, by digest."""
    now = time.time()
    # Runs are read first: the collector notices every use that is recorded later.
    runs, known, read = storage.runs.known(), inventory.stages(), storage.attempts.logs()
    logs: dict[str, Log] = {name: read.get(name, ()) for name in known}
    needs = needs_of(storage, runs, known, logs, now)
    needed = {**needs.of_artifacts, **aliased}
    stages = sorted(
        (_stage(name, logs[name], stored, needs, needed) for name, stored in known.items()),
        key=lambda stage: (stage.used_at, stage.fingerprint),
    )
    artifacts, leftovers = inventory.artifacts(), inventory.leftovers()
    steps = {name: stored.steps for name, stored in known.items() if is_done(logs[name])}
    parts = chain(leftovers, *artifacts.values(), *((each.log, each.work) for each in stages))
    total = sum(stored.size_bytes for stored in parts)
    old_s = max(limits.unused_s, YOUNG_S)
    goes = {stage.fingerprint: stage for stage in stages if _may_go(stage, now, old_s)}
    if limits.max_bytes is not None:
        # Step checkpoints of finished stages go first, since nothing needs them.
        freed_bytes = sum(stored.size_bytes for stored in chain(leftovers, *steps.values()))
        excess = total - limits.max_bytes - freed_bytes
        adoptable = {n for n, log in logs.items() if not is_done(log) and known[n].steps}
        spare = [stage for stage in stages if stage.fingerprint not in adoptable]
        goes |= _beyond(spare, goes, artifacts, needed, excess, now)
    stays = tuple(stage for stage in stages if stage.fingerprint not in goes)
    named = {digest for stage in stays for digest in stage.digests} | needed.keys()
    left = {digest for stage in goes.values() for digest in stage.digests}
    # A damaged log may name any artifact.
    orphan_s = old_s if None not in logs.values() else float("inf")
    return Survey(
        goes=tuple(sorted(goes.values(), key=lambda stage: stage.used_at)),
        stays=stays,
        artifacts=tuple(
            (digest, stored)
            for digest, copies in artifacts.items()
            if digest not in named
            for stored in copies
            if now - max(stored.touched_at, needs.read_at.get(digest, 0.0))
            > (YOUNG_S if digest in left else orphan_s)
        ),
        rests=(*leftovers, *(each for stage in stays for each in steps.get(stage.fingerprint, ()))),
        total_bytes=total,
        runs=tuple(runs),
        at=now,
    )


def _may_go(stage: SurveyedStage, now: float, old_s: float) -> bool:
    return not stage.needed_by and now - stage.used_at > old_s


def _stage(
    fingerprint: str,
    log: Log,
    stored: StoredStage,
    needs: Needs,
    needed: Mapping[str, str],
) -> SurveyedStage:
    records = [entry.record for entry in log or () if entry.record is not None]
    digests = frozenset(record.artifact.digest for record in records)
    users = [run for run in needs.runs if fingerprint in run.used_at]
    reasons = [
        *(["its log is damaged"] if log is None else []),
        *(needs.of_runs[run.key] for run in users if run.key in needs.of_runs),
        *(needed[digest] for digest in sorted(digests) if digest in needed),
    ]
    return SurveyedStage(
        fingerprint=fingerprint,
        name=records[-1].stage if records else "",
        digests=digests,
        log=stored.log,
        work=stored.work,
        used_at=max(
            stored.log.touched_at,
            stored.work.touched_at,
            *(run.used_at[fingerprint] for run in users),
            *(needs.read_at.get(digest, 0.0) for digest in digests),
        ),
        needed_by=reasons[0] if reasons else "",
    )


def _beyond(
    stages: Sequence[SurveyedStage],
    goes: Mapping[str, SurveyedStage],
    artifacts: Mapping[str, Sequence[Stored]],
    needed: Mapping[str, str],
    excess: int,
    now: float,
) -> dict[str, SurveyedStage]:
    num_named = Counter(digest for stage in stages for digest in stage.digests)
    found: dict[str, SurveyedStage] = {}
    for stage in (*goes.values(), *(s for s in stages if s.fingerprint not in goes)):
        already = stage.fingerprint in goes
        if not already and (excess <= 0 or not _may_go(stage, now, YOUNG_S)):
            continue
        num_named.subtract(stage.digests)
        last = [d for d in stage.digests if not num_named[d] and d not in needed]
        freed = [stage.log, stage.work, *(copy for d in last for copy in artifacts.get(d, ()))]
        excess -= sum(stored.size_bytes for stored in freed)
        if not already:
            found[stage.fingerprint] = stage
    return found


@dataclass(frozen=True)
class Collected:
    """Result of a collection: bytes freed, places spared by new uses, and failed removals."""

    freed_bytes: int
    spared: tuple[str, ...]
    problems: tuple[str, ...]


def collect(storage: Storage, inventory: Inventory, found: Survey) -> Collected:
    """Remove what the survey lists unless it became needed, then forget old runs without stages.

    Returns failed removals. The caller holds `Inventory.exclusively`, else `NotExclusiveError`.
    """
    removal = _Removal(storage, inventory, found)
    for stage in found.goes:
        removal.remove_stage(stage)
    for digest in list(removal.copies):
        removal.remove_artifact(digest)
    for stored in found.rests:
        removal.remove_unless(stored, lambda _, place=stored.place: _is_at_work(storage, place))
    _forget(storage, inventory, found)
    return Collected(removal.freed_bytes, tuple(removal.spared), tuple(removal.problems))


class _Removal:
    def __init__(self, storage: Storage, inventory: Inventory, found: Survey) -> None:
        self._storage, self._inventory = storage, inventory
        before = {run.key: run for run in found.runs}

        def spoke() -> Collection[KnownRun]:
            """Return the runs whose records changed after the survey."""
            # Not by time: the store's clock may be behind this machine's.
            return [run for run in storage.runs.known() if run != before.get(run.key)]

        self._spoke = functools.cache(spoke) if inventory.others_wait else spoke
        self._naming = _naming(storage)
        self.freed_bytes = 0
        self.spared: list[str] = []
        self.problems: list[str] = []
        self.copies: dict[str, list[Stored]] = {}
        """Copies of the artifacts whose removal was not tried yet, by digest."""
        for digest, stored in found.artifacts:
            self.copies.setdefault(digest, []).append(stored)

    def remove_unless(self, stored: Stored, is_needed: Callable[[float], bool]) -> bool:
        """Remove a place unless it is needed, and record the result; return True if it is gone."""
        try:
            if not self._inventory.remove_unless(stored.place, is_needed):
                self.spared.append(stored.place)
                return False
        except OSError as error:
            self.problems.append(f"{stored.place}: {error}")
            return False
        self.freed_bytes += stored.size_bytes
        return True

    def remove_stage(self, stage: SurveyedStage) -> None:
        """Remove a stage's log, its working files, and the artifacts that no other log names."""
        name, attempts = stage.fingerprint, self._storage.attempts
        if not self.remove_unless(stage.log, lambda at: _is_used(stage, at, self._spoke())):
            return
        self.remove_unless(stage.work, lambda _: bool(attempts.entries(name)))
        for digest in stage.digests:
            self._naming.get(digest, set[str]()).discard(name)
            if not self._naming.get(digest):
                self.remove_artifact(digest)

    def remove_artifact(self, digest: str) -> None:
        """Remove all copies, unless a log names the digest or it was read or published again."""
        for stored in self.copies.pop(digest, ()):
            self.remove_unless(
                stored,
                lambda touched_at, before=stored.touched_at: (
                    bool(self._naming.get(digest))
                    or touched_at > before
                    or any(digest in run.read_at for run in self._spoke())
                ),
            )


def _is_used(stage: SurveyedStage, touched_at: float, spoke: Collection[KnownRun]) -> bool:
    return touched_at > stage.log.touched_at or any(
        stage.fingerprint in run.used_at or not stage.digests.isdisjoint(run.read_at)
        for run in spoke
    )


def _is_at_work(storage: Storage, place: str) -> bool:
    parts = place.split("/")
    if parts[0] != "work" or not parts[-1].startswith("steps-"):
        return False
    try:
        return not is_done(storage.attempts.entries(parts[1]))
    except ArtifactError:
        return True


def _naming(storage: Storage) -> dict[str, set[str]]:
    """Return the fingerprints of the stages whose logs name each artifact now, by digest."""
    found: dict[str, set[str]] = {}
    for fingerprint, log in storage.attempts.logs().items():
        for entry in log or ():  # None: a damaged log, which the survey kept
            if entry.record is not None:
                found.setdefault(entry.record.artifact.digest, set()).add(fingerprint)
    return found


def _forget(storage: Storage, inventory: Inventory, found: Survey) -> None:
    left = inventory.stages().keys()
    for run in storage.runs.known():
        is_recent = found.at - run.spoke_at < YOUNG_S
        if not (run.kept or is_recent or left & run.used_at.keys()):
            storage.runs.forget(run.key)


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
    """Return what is needed, except by a tracker's aliases; `OSError` if the store fails."""
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
    """Return why runs are needed, by key; heartbeats and follower files show active runs."""
    found: dict[str, str] = {}
    for run in runs:
        signs = (stages[each].touched_at for each in run.used_at if each in stages)
        if run.kept:
            found[run.key] = f"run {run.name} is kept"
        elif now - max(run.spoke_at, *signs, 0.0) <= YOUNG_S:
            found[run.key] = f"run {run.name} may be at work"
    return found


def _promoted(storage: Storage, logs: Iterable[Log]) -> dict[str, str]:
    """Return reasons by digest for the last champions and challengers, which may be registered."""
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
    """Return reasons by digest for the inputs of possibly active stages and their next stages."""
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
    """Return the digest of an input; for an external path into a store, the digest in the path."""
    inside = digest_in_path(given.uri) if given.kind == EXTERNAL_KIND else None
    return inside or given.digest
