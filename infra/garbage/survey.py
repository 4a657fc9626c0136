"""What may be removed from a store, and why the rest stays.

A stage stays while something needs it (`infra.garbage.needs`). Otherwise it goes after a time
without use; above a limit of bytes the least recently used go earlier, except unfinished ones with
checkpoints, which may be adopted. An artifact goes with the last stage that names it.

Promises: a survey changes nothing, and keeps every stage with a damaged log. Stages without a
recorded run count as used when they were last written.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra.garbage.needs import DAY_S, YOUNG_S, Log, Needs, is_done, needs_of
from infra.store.inventory import Inventory, Stored, StoredStage
from infra.store.runs import KnownRun
from infra.store.storage import Storage


@dataclass(frozen=True)
class Limits:
    """Unneeded stages go after `unused_s` (at least `YOUNG_S`), or above `max_bytes` in total."""

    unused_s: float = 30 * DAY_S
    max_bytes: int | None = None


@dataclass(frozen=True)
class SurveyedStage:
    """A stage and its working files; `needed_by` is the reason why it stays, or empty.

    `digests` are of the artifacts that its log names. `used_at` is when it was last requested, read
    or written, in seconds since the epoch. An unknown `name` is empty.
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

    `goes`, `artifacts` and `rests` go: stages (the longest unused first), artifacts that no staying
    stage names, and files of dead writers or step checkpoints of finished stages. `runs` were read
    first; `total_bytes` excludes the records of runs.
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
        """Size of what goes."""
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
    """Survey a store; `aliased` gives reasons by digest for artifacts with an alias."""
    now = time.time()
    # Runs are read first: the collector notices every use that is recorded later.
    runs = storage.runs.known()
    known, read = inventory.stages(), storage.attempts.logs()
    logs: dict[str, Log] = {name: read.get(name, ()) for name in known}
    needs = needs_of(storage, runs, known, logs, now)
    needed = {**needs.of_artifacts, **aliased}
    stages = sorted(
        (_stage(name, logs[name], stored, needs, needed) for name, stored in known.items()),
        key=lambda stage: (stage.used_at, stage.fingerprint),
    )
    artifacts, leftovers = inventory.artifacts(), inventory.leftovers()
    steps = {name: stored.steps for name, stored in known.items() if is_done(logs[name])}
    total = sum(stored.size_bytes for stored in _all(artifacts, leftovers, stages))
    old_s = max(limits.unused_s, YOUNG_S)
    goes = {stage.fingerprint: stage for stage in stages if _is_old(stage, now, old_s)}
    if limits.max_bytes is not None:
        # Step checkpoints of finished stages go first, since nothing needs them.
        free = (*leftovers, *(stored for each in steps.values() for stored in each))
        excess = total - limits.max_bytes - sum(stored.size_bytes for stored in free)
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
            if now - needs.touched_at(digest, stored) > (YOUNG_S if digest in left else orphan_s)
        ),
        rests=(*leftovers, *(each for stage in stays for each in steps.get(stage.fingerprint, ()))),
        total_bytes=total,
        runs=tuple(runs),
        at=now,
    )


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
    stages: Iterable[SurveyedStage],
    goes: Mapping[str, SurveyedStage],
    artifacts: Mapping[str, Sequence[Stored]],
    needed: Mapping[str, str],
    excess: int,
    now: float,
) -> dict[str, SurveyedStage]:
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
