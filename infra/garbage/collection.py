"""Taking away what a survey found, while others use the store.

A stage loses its log first, so that nobody finds it done; then what its attempts left; then the
artifacts that no log names any more. Before each is removed for good it is asked once more whether
somebody needs it, which is when whoever came in between has said so (`infra.store.runs`).

Promises: a kill at any point leaves a store that works, and the rest to the next collection.
"""

from collections.abc import Callable
from dataclasses import dataclass

from infra.errors import ArtifactError
from infra.garbage.survey import YOUNG_S, Survey, SurveyedStage, is_done
from infra.store.inventory import Inventory, Stored
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
    """Take away what may go.

    Args:
        storage: that was surveyed.
        inventory: of the same store.
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

    for stage in found.goes:
        if take(stage.log, lambda _, stage=stage: _is_used(storage, stage)):
            take(
                stage.work, lambda _, stage=stage: bool(storage.attempts.entries(stage.fingerprint))
            )
    named = _named(storage, inventory)
    for digest, stored in found.artifacts:
        take(
            stored,
            lambda touched_at, digest=digest, stored=stored: (
                digest in named or touched_at > stored.touched_at
            ),
        )
    for stored in found.rests:
        take(stored, lambda _, place=stored.place: _is_at_work(storage, place))
    _forget(storage, inventory, found)
    return Collected(freed_bytes, tuple(spared), tuple(problems))


def _is_used(storage: Storage, stage: SurveyedStage) -> bool:
    """Whether a run asked for a stage, or asked to keep it, after the survey.

    The store's own times are compared with each other: its clock may be behind this machine's.
    """
    return any(
        run.kept or run.used_at[stage.fingerprint] > stage.used_at
        for run in storage.runs.known()
        if stage.fingerprint in run.used_at
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


def _named(storage: Storage, inventory: Inventory) -> set[str]:
    """Digests that logs name now; of a damaged log nothing is known, and nothing of it went."""
    found: set[str] = set()
    for fingerprint in inventory.stages():
        try:
            entries = storage.attempts.entries(fingerprint)
        except ArtifactError:
            continue
        found |= {entry.record.artifact.digest for entry in entries if entry.record is not None}
    return found


def _forget(storage: Storage, inventory: Inventory, found: Survey) -> None:
    """Runs of which no stage is left, and that are not just about to compute one."""
    left = set(inventory.stages())
    for run in storage.runs.known():
        recent = found.at - max(run.used_at.values(), default=0.0) < YOUNG_S
        if not (run.kept or recent or left & run.used_at.keys()):
            storage.runs.forget(run.key)
