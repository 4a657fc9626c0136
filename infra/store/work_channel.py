"""What a job and its watchers tell each other: `work/<fingerprint>/` of the store.

Specification, heartbeat, errors and journal of each attempt, and the step checkpoints of each
generation. It belongs to the store and not to a home, so whoever reaches the store can watch.

    work/<fingerprint>/
        attempt-<n>/spec.json, error.json, heartbeat, stacks.txt, journal.jsonl, output/ ...
                    samples/00000010.json  what a step kept, see `infra.tracking.samples`
        steps-<g>/step-00000050/         g: first attempt of the generation; if it adopted a
                                         checkpoint, a part of that one's digest follows
        followers/<name>                 see `infra.store.followers`

Promises: nothing here is shared by two attempts but the step checkpoints, which are named by
their content's manifest and appear whole, and no attempt continues from one whose steps the
counted journals do not have; what a commit prunes, neither a reader of journals nor a
person who looks for the reason of something misses.
Does not promise: that any of it is true of a living job. The stage's log is.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, ConfigError
from infra.field_errors import to_config_error
from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes, make_directories, remove_directory
from infra.store.canonical import canonical_json
from infra.store.heartbeat import Beat, read_beat
from infra.store.stage_spec import Adoption, StageSpec
from infra.store.step_directories import remove_steps_after, step_directories

SAMPLES_DIR = "samples"


Cause = Literal["", "dead_rank", "disk_full", "hang", "non_finite", "out_of_memory"]


class JobProblem(FrozenModel):
    """Why an attempt ended without a commit."""

    type: str
    message: str
    exit_code: int
    cause: Cause = ""
    """Of those that are told apart; empty: another."""
    phase: str = ""
    """What the job was doing; empty: not known."""


class WorkChannel(Protocol):
    """The channel of one fingerprint, wherever the store is."""

    def write_specification(self, spec: StageSpec) -> None:
        """Say what an attempt is to do; before its job is submitted."""
        ...

    def read_specification(self, attempt: int) -> StageSpec:
        """What an attempt is to do.

        Args:
            attempt: its number.

        Returns:
            The specification, validated.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        ...

    def write_error(self, attempt: int, problem: JobProblem) -> None:
        """Say that an attempt is over."""
        ...

    def read_error(self, attempt: int) -> JobProblem | None:
        """Why an attempt is over; None if it did not say so."""
        ...

    def read_beat(self, attempt: int) -> Beat | None:
        """An attempt's last sign of life; an `OSError` says nothing about it."""
        ...

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """A stretch of an attempt's journal segment; empty if there is none."""
        ...

    def read_samples(self, attempt: int) -> dict[int, bytes]:
        """What an attempt kept of its steps, by step; see `infra.tracking.samples`."""
        ...

    def local_dir(self, attempt: int) -> Path:
        """A directory of the attempt alone, on this machine, where it may write what it likes.

        `heartbeat`, `journal.jsonl` and `samples/` in it reach the watchers; an output that lies
        here is published without a copy.
        """
        ...

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """Where the step checkpoints of a generation are; shared by its attempts.

        Args:
            generation: number of its first attempt.
            adopted: what that one adopted. The place has a name of its own, so that it can be
                filled before anybody holds the attempt.

        Returns:
            The directory; it may not exist.
        """
        ...

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """Bring the newest valid step checkpoint here, and let others have those to come.

        Args:
            attempt: that continues from it, is held, and has opened its journal.
            steps: the place, as `steps_dir` named it.
            last: step at which what counts of the journal ends. A checkpoint of a later one was
                published by an attempt that was replaced, and is removed here.
            before_publish: called before others can have one; `FencedError` ends the sharing.

        Raises:
            OSError: what is there cannot be known.
        """
        ...

    def fetch_steps(self, steps: Path, last: int) -> None:
        """Bring the newest valid step checkpoint of a place here that is not of a later step.

        Raises as `share_steps`.
        """
        ...

    def ship_steps(self, steps: Path) -> None:
        """Let others have the checkpoints of a place before this returns; raises the same."""
        ...

    def step_numbers(self, steps: Path) -> list[int]:
        """Steps with a checkpoint in a place, ascending; whether they verify is not said."""
        ...

    def prune(self, attempts: Iterable[int], steps: Path) -> None:
        """Remove what only a stage that is not done needs: after its commit, once or again.

        Step checkpoints go, and what the attempts kept in directories of their own, but for logs.
        Specifications, errors, stacks, beats, journals and kept samples stay.

        Args:
            attempts: numbers of all attempts of the committed generation.
            steps: its step checkpoints, as `steps_dir` named them.

        Raises:
            OSError: some of it could not be removed; the rest may be.
        """
        ...


class FileChannel:
    """`WorkChannel` in a directory that the job and its watchers share.

    Args:
        directory: of one fingerprint; created when something is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write_specification(self, spec: StageSpec) -> None:
        """See `WorkChannel.write_specification`."""
        path = self._path(spec.attempt, "spec.json")
        make_directories(path.parent)
        atomic_write_bytes(path, canonical_json(spec))

    def read_specification(self, attempt: int) -> StageSpec:
        """See `WorkChannel.read_specification`."""
        path = self._path(attempt, "spec.json")
        return parse_specification(_read(path), str(path))

    def write_error(self, attempt: int, problem: JobProblem) -> None:
        """See `WorkChannel.write_error`."""
        path = self._path(attempt, "error.json")
        make_directories(path.parent)
        atomic_write_bytes(path, canonical_json(problem))

    def read_error(self, attempt: int) -> JobProblem | None:
        """See `WorkChannel.read_error`."""
        path = self._path(attempt, "error.json")
        return parse_problem(_read(path), str(path))

    def read_beat(self, attempt: int) -> Beat | None:
        """See `WorkChannel.read_beat`."""
        return read_beat(self._path(attempt, "heartbeat"))

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """See `WorkChannel.read_journal`."""
        try:
            with self._path(attempt, "journal.jsonl").open("rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(max(0, end - start))
        except FileNotFoundError:
            return b""

    def read_samples(self, attempt: int) -> dict[int, bytes]:
        """See `WorkChannel.read_samples`."""
        files = sorted(self._path(attempt, SAMPLES_DIR).glob("[0-9]*.json"))
        return {int(path.stem): path.read_bytes() for path in files if path.stem.isdigit()}

    def journal_bytes(self, attempt: int) -> int:
        """Bytes of the complete lines of an attempt's journal segment."""
        return self.read_journal(attempt).rfind(b"\n") + 1

    def local_dir(self, attempt: int) -> Path:
        """See `WorkChannel.local_dir`."""
        path = self._directory / f"attempt-{attempt}"
        make_directories(path)
        return path

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """See `WorkChannel.steps_dir`."""
        return self._directory / steps_name(generation, adopted)

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """See `WorkChannel.share_steps`: the place is shared, whoever saves there asks himself."""
        remove_steps_after(steps, last)

    def fetch_steps(self, steps: Path, last: int) -> None:
        """See `WorkChannel.fetch_steps`."""

    def ship_steps(self, steps: Path) -> None:
        """See `WorkChannel.ship_steps`."""

    def step_numbers(self, steps: Path) -> list[int]:
        """See `WorkChannel.step_numbers`."""
        return list(step_directories(steps))

    def prune(self, attempts: Iterable[int], steps: Path) -> None:
        """See `WorkChannel.prune`."""
        remove_directory(steps)
        for attempt in attempts:
            prune_attempt(self.local_dir(attempt))

    def _path(self, attempt: int, name: str) -> Path:
        return self._directory / f"attempt-{attempt}" / name


def parse_specification(data: bytes | None, where: str) -> StageSpec:
    """The specification in the bytes of its file, of which None says that there are none."""
    if data is None:
        raise ConfigError(where, "does not exist; need the specification")
    try:
        return StageSpec.model_validate(json.loads(data))
    except ValidationError as error:
        raise to_config_error(error, StageSpec, "spec") from None
    except ValueError as error:
        raise ConfigError(where, f"not JSON ({error})") from None


def parse_problem(data: bytes | None, where: str) -> JobProblem | None:
    """The problem in the bytes of its file, of which None says that there are none."""
    try:
        return None if data is None else JobProblem.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactCorruptError(f"{where}: {str(error).splitlines()[0]}") from error


def steps_name(generation: int, adopted: Adoption | None) -> str:
    """What the place of a generation's step checkpoints is called."""
    return f"steps-{generation}{f'-{adopted.digest[:12]}' if adopted else ''}"


def prune_attempt(directory: Path) -> None:
    """Remove what an attempt kept in directories of its own, but for logs and samples."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != SAMPLES_DIR:
            _remove_but_logs(path)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove_but_logs(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_but_logs(path)
        elif path.suffix != ".log":
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds a log
        directory.rmdir()
