"""Removal of what a survey found, while others use the store.

A stage first loses its log, so it does not count as done any more; then its working files; then the
artifacts that no other log names; then the next stage follows. Just before each removal the records
of use are read once more (`infra.store.runs`), to spare what became needed meanwhile. A kill at any
moment leaves a working store, and the rest for the next collection.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from infra.errors import ArtifactError
from infra.garbage.roots import YOUNG_S, Survey, SurveyedStage, is_done
from infra.store.inventory import Inventory, Stored
from infra.store.runs import KnownRun
from infra.store.storage import Storage


@dataclass(frozen=True)
class Collected:
    """Result of a collection: bytes freed, places spared by new uses, and failed removals."""

    freed_bytes: int
    spared: tuple[str, ...]
    problems: tuple[str, ...]


def collect(storage: Storage, inventory: Inventory, found: Survey) -> Collected:
    """Remove what may go unless it became needed; a failed removal does not stop the others.

    The caller holds `Inventory.exclusively`; `NotExclusiveError` is raised if it was lost.
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
    def __init__(self, storage: Storage, inventory: Inventory, found: Survey) -> None:
        self._storage, self._inventory = storage, inventory
        self._spoke = _who_spoke(storage, inventory, found)
        self._naming = _naming(storage)
        self.freed_bytes = 0
        self.spared: list[str] = []
        self.problems: list[str] = []
        self.copies: dict[str, list[Stored]] = {}
        """Artifacts that were not tried yet, by digest."""
        for digest, stored in found.artifacts:
            self.copies.setdefault(digest, []).append(stored)

    def take(self, stored: Stored, is_needed: Callable[[float], bool]) -> bool:
        """Remove something and note the result; return True if it is gone."""
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
        """Remove log, work and artifacts that only this stage named, so each stage frees space."""
        name, attempts = stage.fingerprint, self._storage.attempts
        if not self.take(stage.log, lambda at: _is_used(stage, at, self._spoke())):
            return
        self.take(stage.work, lambda _: bool(attempts.entries(name)))
        for digest in stage.digests:
            self._naming.get(digest, set[str]()).discard(name)
            if not self._naming.get(digest):
                self.take_artifact(digest)

    def take_artifact(self, digest: str) -> None:
        """Remove all copies, unless a log names the digest or it was read or published again."""
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
    """Return a function that lists the runs whose records changed after the survey."""
    before = {run.key: run for run in found.runs}

    def ask() -> Collection[KnownRun]:
        # Not by time: the store's clock may be behind this machine's.
        return [run for run in storage.runs.known() if run != before.get(run.key)]

    return functools.cache(ask) if inventory.others_wait else ask


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
    """Return by digest the stages whose logs name an artifact now."""
    found: dict[str, set[str]] = {}
    for fingerprint, log in storage.attempts.logs().items():
        for entry in log or ():  # None: a damaged log, which the survey kept
            if entry.record is not None:
                found.setdefault(entry.record.artifact.digest, set()).add(fingerprint)
    return found


def _forget(storage: Storage, inventory: Inventory, found: Survey) -> None:
    left = set(inventory.stages())
    for run in storage.runs.known():
        recent = found.at - run.spoke_at < YOUNG_S
        if not (run.kept or recent or left & run.used_at.keys()):
            storage.runs.forget(run.key)
