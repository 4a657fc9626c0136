"""Taking away what a survey found, while others use the store.

A stage loses its log first, so that nobody finds it done; then what its attempts left; then the
artifacts that no other log names; then it is the next one's turn. Before each is removed for good
it is asked once more whether somebody needs it, which is when whoever came in between has said so
(`infra.store.runs`).

Promises: a kill at any point leaves a store that works, and the rest to the next collection;
what was done before it has made room.
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
    removal = _Removal(storage, inventory, found)
    for stage in found.goes:
        removal.take_stage(stage)
    for digest in list(removal.copies):
        removal.take_artifact(digest)
    for stored in found.rests:
        removal.take(stored, lambda _, place=stored.place: _is_at_work(storage, place))
    _forget(storage, inventory, found)
    return Collected(removal.freed_bytes, tuple(removal.spared), tuple(removal.problems))


class _Removal:
    """A collection, and what it did so far.

    Args:
        storage: that was surveyed.
        inventory: of the same store.
        found: by the survey.
    """

    def __init__(self, storage: Storage, inventory: Inventory, found: Survey) -> None:
        self._storage, self._inventory = storage, inventory
        self._spoke = _who_spoke(storage, inventory, found)
        self._naming = _naming(storage)
        self.freed_bytes = 0
        self.spared: list[str] = []
        self.problems: list[str] = []
        self.copies: dict[str, list[Stored]] = {}
        """Artifacts that nobody tried to take yet, by digest."""
        for digest, stored in found.artifacts:
            self.copies.setdefault(digest, []).append(stored)

    def take(self, stored: Stored, is_needed: Callable[[float], bool]) -> bool:
        """Whether it is gone; what could not be removed stops nothing else."""
        try:
            if not self._inventory.take(stored.place, is_needed):
                self.spared.append(stored.place)
                return False
        except OSError as error:
            self.problems.append(f"{stored.place}: {error}")
            return False
        self.freed_bytes += stored.size_bytes
        return True

    def take_stage(self, stage: SurveyedStage) -> None:
        """Its log, its work, and what it was the last to name: so each stage makes room."""
        name, attempts = stage.fingerprint, self._storage.attempts
        if not self.take(stage.log, lambda at: _is_used(stage, at, self._spoke())):
            return
        self.take(stage.work, lambda _: bool(attempts.entries(name)))
        for digest in stage.digests:
            self._naming.get(digest, set[str]()).discard(name)
            if not self._naming.get(digest):
                self.take_artifact(digest)

    def take_artifact(self, digest: str) -> None:
        """All that is of this content, unless a log names it or somebody reads or published it."""
        for stored in self.copies.pop(digest, ()):
            self.take(
                stored,
                lambda touched_at, before=stored.touched_at: (
                    bool(self._naming.get(digest))
                    or touched_at > before
                    or any(digest in run.read_at for run in self._spoke())
                ),
            )


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


def _naming(storage: Storage) -> dict[str, set[str]]:
    """Fingerprints of the stages whose logs name an artifact by now, by its digest.

    Of a damaged log nothing is known, and nothing of it went. Who commits one that is there
    already has published it anew, which shows.
    """
    found: dict[str, set[str]] = {}
    for fingerprint, log in storage.attempts.logs().items():
        for entry in log or ():
            if entry.record is not None:
                found.setdefault(entry.record.artifact.digest, set()).add(fingerprint)
    return found


def _forget(storage: Storage, inventory: Inventory, found: Survey) -> None:
    """Runs of which no stage is left, and that are not just about to compute one."""
    left = set(inventory.stages())
    for run in storage.runs.known():
        recent = found.at - run.spoke_at < YOUNG_S
        if not (run.kept or recent or left & run.used_at.keys()):
            storage.runs.forget(run.key)
