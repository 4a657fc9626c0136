"""Continuing a stage from what was half-trained under another fingerprint.

A stage that is edited, or given another layout, is another stage: the step checkpoints of the
work before lie under its fingerprint, where nothing looks for them. Adopting begins a generation
of the new stage whose first checkpoint is the newest valid one of that work, and whose journal
begins with the metrics of its steps. It says so in the stage's log, which the commit, the tracker
and the report repeat.

Promises: what is trained stays the same: model, data, seed, algorithm, optimizer and schedule are
compared field by field, and a difference is refused by name. Code, libraries and what is marked
`Execution` may differ, and are named. Nothing of the other work is changed, and its checkpoint is
linked before anything is recorded, so a failure or a kill leaves the stage as it was.
Does not promise: that the adopted steps are what the code of now would compute. The order of rows
and the seeds of a step are functions of (seed, step), so no row is left out or read twice; random
generators of ranks are restored at the same number of ranks only.
"""

from dataclasses import dataclass
from pathlib import Path

from engines.config.base import Change
from infra.errors import ArtifactNotFoundError, ConfigError
from infra.store.stage_log import generation
from infra.store.stage_spec import Adoption, some
from infra.store.step_directories import link_checkpoint, newest_valid
from infra.store.storage import Storage
from infra.tracking.journal import Journal, num_done, read_journal
from tasks.runner.differences import DIGITS, UNNAMED, differences, specification
from tasks.runner.identity import StageRequest


@dataclass(frozen=True)
class HalfTrained:
    """Uncommitted work on a stage under another fingerprint.

    Attributes:
        generation: number of its first attempt.
        root: holds its checkpoints.
        step: its newest checkpoint, counted within the stage; nothing was verified.
        differs: what may differ and does: fields with both values, modules of source, libraries.
        refused: what is trained and differs.
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
        """Describe how a stage can adopt it; empty if it was given other inputs."""
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
    """Half-trained work on a stage that is further than its own.

    Args:
        storage: where the work is; no checkpoint is read.

    Returns:
        One for each other fingerprint: first what may be adopted, then the most steps.
    """
    at = own_step(storage, request)
    found = [
        work
        for fingerprint in storage.with_steps()
        if fingerprint != request.fingerprint and (work := _work(storage, fingerprint, request))
    ]
    ahead = [work for work in found if work.step > at]
    return sorted(ahead, key=lambda work: (len(work.refused), -work.step))


def own_step(storage: Storage, request: StageRequest) -> int:
    """The newest step checkpoint of a stage's own work that is not committed; 0 without one."""
    own = _open_generation(storage, request.fingerprint)
    return max(_told_steps(storage, request.fingerprint, *own), default=0) if own else 0


def find_adoptable(storage: Storage, request: StageRequest) -> HalfTrained | None:
    """Find the half-trained work that `--adopt` continues.

    Args:
        storage: where the work is.

    Returns:
        The work; None where the stage's own is as far, after an earlier adoption for one.

    Raises:
        ConfigError: there is none, or it trains something else; names the field.
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
        also = f" (and {', '.join(change.field for change in more)})" if more else ""
        raise ConfigError(
            first.field,
            f"got {first.now}; need {first.before}, as {found[0]} was trained{also}; set it back, "
            f"or run without --adopt {request.label}",
        )
    return found[0]


def link_adopted(work: HalfTrained, storage: Storage, fingerprint: str, attempt: int) -> Adoption:
    """Put the work's newest valid checkpoint where an attempt that adopts it would look.

    One of a step that the work's journal lacks is left aside: its metrics could not be told.

    Args:
        storage: where both are.
        fingerprint: of the stage that goes on.
        attempt: that would begin a generation with it; need not be held.

    Returns:
        What its entry in the log is to say.

    Raises:
        ArtifactError: no checkpoint of the work is valid any more.
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


def copy_adopted_steps(storage: Storage, request: StageRequest, attempt: int) -> Adoption | None:
    """Begin an attempt's journal with the adopted steps, if its generation has not got them.

    They are told as the other work recorded them, once, up to the checkpoint.

    Args:
        storage: where both journals are.
        attempt: is held, and has no job yet.

    Returns:
        What the attempt's generation adopted; None if all of it is its own.
    """
    first = generation(storage.attempts.entries(request.fingerprint), attempt)[0]
    adopted = first.adopted
    if adopted is None:
        return None
    last = request.config.num_previous_steps + adopted.step
    theirs, _ = read_journal(storage, adopted.fingerprint, attempt=adopted.generation)
    mine, _ = read_journal(storage, request.fingerprint)
    path = storage.channel(request.fingerprint).local_dir(attempt) / "journal.jsonl"
    with Journal(path, mine) as journal:
        journal.copy(each for each in theirs if each.step is not None and each.step <= last)
        if attempt == first.number:
            journal.log(f"adopted {adopted}")
    return adopted


def _work(storage: Storage, fingerprint: str, request: StageRequest) -> HalfTrained | None:
    """A fingerprint's work, if it is half-trained and on the stage that is asked for."""
    work, spec = _open_generation(storage, fingerprint), specification(storage, fingerprint)
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
    """Step checkpoints of a generation that may be continued; they are not read."""
    steps = storage.channel(fingerprint).step_numbers(root)
    last = _num_told(storage, fingerprint, number) if steps else 0
    return [step for step in steps if step <= last]


def _num_told(storage: Storage, fingerprint: str, number: int) -> int:
    """Steps that a generation's journal tells."""
    first = generation(storage.attempts.entries(fingerprint), number)[0]
    records, _ = read_journal(storage, fingerprint, attempt=number)
    return num_done(records, first.adopted)


def _open_generation(storage: Storage, fingerprint: str) -> tuple[int, Path] | None:
    """Number and step checkpoints of the newest generation, if that is not committed."""
    members = generation(storage.attempts.entries(fingerprint))
    if not members or members[-1].kind == "committed":
        return None
    number = members[0].number
    return number, storage.channel(fingerprint).steps_dir(number, members[0].adopted)
