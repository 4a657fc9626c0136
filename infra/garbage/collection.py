"""Taking away what a survey found, while others use the store.

A stage loses its log first, so that nobody finds it done; then what its attempts left; then the
artifacts that no log names any more. Before each is removed for good it is asked once more whether
somebody needs it, which is when whoever came in between has said so (`infra.store.runs`).

Promises: a kill at any point leaves a store that works, and the rest to the next collection.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from infra.errors import ArtifactError
from infra.garbage.needs import YOUNG_S, is_done
from infra.garbage.survey import Survey, SurveyedStage
from infra.store.inventory import Inventory, Stored
from infra.store.runs import KnownRun
from infra.store.storage import Storage


@dataclass(frozen=True)
class Collected:
    """What a collection did.

    Attributes:
        freed_bytes: of what is gone.
        spared: what somebody began to need meanwhile.
        problems: what could not be removed, and why.
    """

    freed_bytes: int
    spared: tuple[str, ...]
    problems: tuple[str, ...]


def collect(storage: Storage, inventory: Inventory, found: Survey) -> Collected:
    """Take away what may go, unless somebody began to need it after the survey.

    Args:
        storage: that was surveyed.
        inventory: of the same store, which is the caller's (`Inventory.exclusively`).
        found: by the survey.

    Returns:
        What was done; that something could not be removed stops nothing else.

    Raises:
        NotExclusiveError: as of `Inventory.exclusively`, which lasts no more.
    """
    freed_bytes, spared, problems = 0, list[str](), list[str]()

    def take(stored: Stored, is_needed: Callable[[float], bool]) -> bool:
        nonlocal freed_bytes
        try:
            if not inventory.take(stored.place, is_needed):
                spared.append(stored.place)
                return False
        except OSError as error:
            problems.append(f"{stored.place}: {error}")
            return False
        freed_bytes += stored.size_bytes
        return True

    spoke = _who_spoke(storage, inventory, found)
    for stage in found.goes:
        if take(stage.log, lambda at, stage=stage: _is_used(stage, at, spoke())):
            take(
                stage.work, lambda _, stage=stage: bool(storage.attempts.entries(stage.fingerprint))
            )
    named = _named(storage)
    for digest, stored in found.artifacts:
        take(
            stored,
            lambda touched_at, digest=digest, stored=stored: (
                digest in named
                or touched_at > stored.touched_at
                or any(digest in run.read_at for run in spoke())
            ),
        )
    for stored in found.rests:
        take(stored, lambda _, place=stored.place: _is_at_work(storage, place))
    _forget(storage, inventory, found)
    return Collected(freed_bytes, tuple(spared), tuple(problems))


def _who_spoke(
    storage: Storage, inventory: Inventory, found: Survey
) -> Callable[[], Collection[KnownRun]]:
    """Asks which runs said anything after the survey: they need all that is theirs.

    Records are compared, and no times: the store's clock may be behind this machine's, or slow.
    """
    before = {run.key: run for run in found.runs}

    def ask() -> Collection[KnownRun]:
        return [run for run in storage.runs.known() if run != before.get(run.key)]

    return functools.cache(ask) if inventory.others_wait else ask


def _is_used(stage: SurveyedStage, touched_at: float, spoke: Collection[KnownRun]) -> bool:
    """Whether a stage is one of a run that spoke, or somebody wrote to its log meanwhile."""
    return touched_at > stage.log.touched_at or any(
        stage.fingerprint in run.used_at or not stage.digests.isdisjoint(run.read_at)
        for run in spoke
    )


def _is_at_work(storage: Storage, place: str) -> bool:
    """Whether these are steps of a stage that somebody computes anew by now."""
    parts = place.split("/")
    if parts[0] != "work" or not parts[-1].startswith("steps-"):
        return False
    try:
        return not is_done(storage.attempts.entries(parts[1]))
    except ArtifactError:
        return True


def _named(storage: Storage) -> set[str]:
    """Digests that logs name by now; of a damaged log nothing is known, and nothing of it went."""
    return {
        entry.record.artifact.digest
        for log in storage.attempts.logs().values()
        for entry in log or ()
        if entry.record is not None
    }


def _forget(storage: Storage, inventory: Inventory, found: Survey) -> None:
    """Runs of which no stage is left, and that are not just about to compute one."""
    left = set(inventory.stages())
    for run in storage.runs.known():
        recent = found.at - run.spoke_at < YOUNG_S
        if not (run.kept or recent or left & run.used_at.keys()):
            storage.runs.forget(run.key)
