"""What of a store may go, and why the rest stays.

A stage stays while something needs it: a run that somebody keeps, a model that an alias points to,
an attempt that lives and what it reads. What nothing needs goes once it was not used for a time;
beyond a limit of bytes the least recently used goes earlier, unless it is half-trained: its
checkpoints may be adopted. An artifact goes with the last stage that names it.

Promises: nothing is changed here; nothing whose log is damaged is called garbage.
Does not promise: to know runs of a time before stores recorded them. Their stages count as used
when they were last written to.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra.errors import ArtifactError, ConfigError
from infra.store.inventory import Inventory, Stored
from infra.store.runs import KnownRun
from infra.store.stage_log import LogEntry
from infra.store.storage import Storage
from infra.tracking.promotion import PROMOTION, Decision

DAY_S = 24 * 3600.0
YOUNG_S = DAY_S
"""What was used since then stays, whatever the limits: its user may just be at work."""


@dataclass(frozen=True)
class Limits:
    """When what nothing needs goes.

    Attributes:
        unused_s: once it was not used for so long; `YOUNG_S` at least.
        max_bytes: beyond so many in all the least recently used goes too, but for what has
            checkpoints that may be adopted; None: no limit.
    """

    unused_s: float = 30 * DAY_S
    max_bytes: int | None = None


@dataclass(frozen=True)
class SurveyedStage:
    """A stage and what its attempts left.

    Attributes:
        fingerprint: of the stage.
        name: of its kind (`sft`); empty where nothing says it.
        digests: of the artifacts that its log names; none of a stage that is not done.
        log: of the stage.
        work: of its attempts.
        used_at: when it was last asked for or written to; seconds since the epoch.
        needed_by: why it stays however old it is; empty: nothing needs it.
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
    """What a store has.

    Attributes:
        goes: stages, the longest unused first.
        stays: stages.
        artifacts: that go, with their digests: with those stages, or since no stage names them.
        rests: that go: of writers that died, and steps of stages that are done.
        total_bytes: of everything in the store but its logs of runs.
        at: when the store was looked at; seconds since the epoch.
    """

    goes: tuple[SurveyedStage, ...]
    stays: tuple[SurveyedStage, ...]
    artifacts: tuple[tuple[str, Stored], ...]
    rests: tuple[Stored, ...]
    total_bytes: int
    at: float

    @property
    def freed_bytes(self) -> int:
        """Of what goes."""
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
    """Look at a store.

    Args:
        storage: of the logs and the runs.
        inventory: of the same store.
        aliased: why an artifact stays, by digest: a registry's alias points to it.
        limits: when things go.

    Returns:
        What it has.

    Raises:
        OSError: the store cannot be read.
    """
    now = time.time()
    logs = {name: _log(storage, name) for name in inventory.stages()}
    needed = {
        **_promoted(storage, logs.values()),
        **aliased,
        **_being_read(storage, inventory, logs, now),
    }
    runs = storage.runs.known()
    stages = sorted(
        (_stage(name, log, inventory, runs, needed) for name, log in logs.items()),
        key=lambda stage: (stage.used_at, stage.fingerprint),
    )
    artifacts, leftovers = inventory.artifacts(), inventory.leftovers()
    steps = {name: inventory.steps(name) for name, log in logs.items() if is_done(log)}
    total = sum(stored.size_bytes for stored in _all(artifacts, leftovers, stages))
    old_s = max(limits.unused_s, YOUNG_S)
    goes = {stage.fingerprint: stage for stage in stages if _is_old(stage, now, old_s)}
    if limits.max_bytes is not None:
        # Steps of stages that are done go first: nobody misses them.
        free = (*leftovers, *(stored for each in steps.values() for stored in each))
        excess = total - limits.max_bytes - sum(stored.size_bytes for stored in free)
        adoptable = {n for n, log in logs.items() if not is_done(log) and inventory.steps(n)}
        spare = [stage for stage in stages if stage.fingerprint not in adoptable]
        goes |= _beyond(spare, goes, artifacts, needed, excess, now)
    stays = tuple(stage for stage in stages if stage.fingerprint not in goes)
    named = {digest for stage in stays for digest in stage.digests} | needed.keys()
    left = {digest for stage in goes.values() for digest in stage.digests}
    # What a damaged log names is not known.
    orphan_s = old_s if None not in logs.values() else float("inf")
    return Survey(
        goes=tuple(sorted(goes.values(), key=lambda stage: stage.used_at)),
        stays=stays,
        artifacts=tuple(
            (digest, stored)
            for digest, copies in artifacts.items()
            for stored in copies
            if digest not in named
            and now - stored.touched_at > (YOUNG_S if digest in left else orphan_s)
        ),
        rests=(*leftovers, *(each for stage in stays for each in steps.get(stage.fingerprint, ()))),
        total_bytes=total,
        at=now,
    )


Log = Sequence[LogEntry] | None
"""None of a stage whose log is damaged."""


def _log(storage: Storage, fingerprint: str) -> Log:
    try:
        return storage.attempts.entries(fingerprint)
    except ArtifactError:
        return None


def is_done(log: Log) -> bool:
    """Whether a stage is committed, and nobody works on it anew."""
    return bool(log) and log[-1].kind == "committed"


def _is_old(stage: SurveyedStage, now: float, old_s: float) -> bool:
    return not stage.needed_by and now - stage.used_at > old_s


def _all(
    artifacts: Mapping[str, Sequence[Stored]],
    leftovers: Iterable[Stored],
    stages: Iterable[SurveyedStage],
) -> Iterator[Stored]:
    yield from leftovers
    for copies in artifacts.values():
        yield from copies
    for stage in stages:
        yield from (stage.log, stage.work)


def _stage(
    fingerprint: str,
    log: Log,
    inventory: Inventory,
    runs: Iterable[KnownRun],
    needed: Mapping[str, str],
) -> SurveyedStage:
    records = [entry.record for entry in log or () if entry.record is not None]
    digests = frozenset(record.artifact.digest for record in records)
    of_log, work = inventory.log(fingerprint), inventory.work(fingerprint)
    users = [run for run in runs if fingerprint in run.used_at]
    reasons = [
        *(["its log is damaged"] if log is None else []),
        *(f"run {run.name} is kept" for run in users if run.kept),
        *(needed[digest] for digest in sorted(digests) if digest in needed),
    ]
    return SurveyedStage(
        fingerprint=fingerprint,
        name=records[-1].stage if records else "",
        digests=digests,
        log=of_log,
        work=work,
        used_at=max(
            of_log.touched_at, work.touched_at, *(run.used_at[fingerprint] for run in users)
        ),
        needed_by=reasons[0] if reasons else "",
    )


def _beyond(
    stages: Iterable[SurveyedStage],
    goes: Mapping[str, SurveyedStage],
    artifacts: Mapping[str, Sequence[Stored]],
    needed: Mapping[str, str],
    excess: int,
    now: float,
) -> dict[str, SurveyedStage]:
    """Stages that go for the size of the store alone, the longest unused first."""
    stages = list(stages)
    num_named = Counter(digest for stage in stages for digest in stage.digests)
    found: dict[str, SurveyedStage] = {}
    for stage in (*goes.values(), *(s for s in stages if s.fingerprint not in goes)):
        already = stage.fingerprint in goes
        if not already and (excess <= 0 or not _is_old(stage, now, YOUNG_S)):
            continue
        num_named.subtract(stage.digests)
        last = [d for d in stage.digests if not num_named[d] and d not in needed]
        freed = [stage.log, stage.work, *(copy for d in last for copy in artifacts.get(d, ()))]
        excess -= sum(stored.size_bytes for stored in freed)
        if not already:
            found[stage.fingerprint] = stage
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
    storage: Storage, inventory: Inventory, logs: Mapping[str, Log], now: float
) -> dict[str, str]:
    """What stages read that may be at work, by digest."""
    found: dict[str, str] = {}
    for fingerprint, log in logs.items():
        if not log or is_done(log) or now - inventory.work(fingerprint).touched_at > YOUNG_S:
            continue
        try:
            spec = storage.channel(fingerprint).read_specification(log[-1].number)
        except ConfigError:
            continue  # nothing was submitted
        found |= {one.digest: f"{spec.stage} reads it" for one in spec.inputs.values()}
    return found
