"""The working files of a stage, which connect its jobs and their watchers.

They belong to the store and not to a home, so every process that reaches the store can watch.

    work/<fingerprint>/
        attempt-<n>/spec.json, error.json, heartbeat, stacks.txt, journal.jsonl, output/ ...
                    samples/00000010.json  samples of a step, see `infra.tracking.samples`
        steps-<g>/step-00000050/         g: first attempt of the generation; with an adopted
                                         checkpoint, a part of its digest follows
        followers/<name>                 see `infra.store.stage_log`

Promises: attempts share only the step checkpoints, which appear completely. No attempt continues
from a checkpoint whose steps the counted journals lack. A prune after the commit keeps journals,
errors, stacks and logs.
Does not promise: that a job is alive. Only the stage's log decides who holds it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, ConfigError, StoreError
from infra.field_errors import to_config_error
from infra.frozen_model import FrozenModel
from infra.store.atomic import make_directories, remove_directory
from infra.store.canonical import canonical_json
from infra.store.files import Files, read_stretch
from infra.store.heartbeat import Beat, parse_beat
from infra.store.stage_spec import Adoption, StageSpec, check_fingerprint
from infra.store.step_directories import remove_steps_after, step_directories

SAMPLES_DIR = "samples"

Cause = Literal["", "dead_rank", "disk_full", "hang", "non_finite", "out_of_memory"]


class JobProblem(FrozenModel):
    """The reason why an attempt ended without a commit, and the job's phase at that time."""

    type: str
    message: str
    exit_code: int
    cause: Cause = ""  # empty: any other
    phase: str = ""


class WorkChannel(ABC):
    """Reads and writes the working files of one fingerprint; `directory` is on this machine."""

    def __init__(self, files: Files, fingerprint: str, directory: Path) -> None:
        self._files, self._directory = files, directory
        self._fingerprint = check_fingerprint(fingerprint)

    def write_specification(self, spec: StageSpec) -> None:
        """Write the specification of an attempt; called before its job is submitted."""
        self._ship(spec.attempt)
        self._files.put(self._name(spec.attempt, "spec.json"), canonical_json(spec))

    def read_specification(self, attempt: int) -> StageSpec:
        """Return the validated specification of an attempt; `ConfigError` if absent or damaged."""
        name = self._name(attempt, "spec.json")
        data = self._files.get(name)
        if data is None:
            need = "does not exist; need the stage's specification, written at its start"
            raise ConfigError(self._files.place(name), need)
        try:
            return StageSpec.model_validate(json.loads(data))
        except ValidationError as error:
            raise to_config_error(error, StageSpec, "spec") from None
        except ValueError as error:
            raise ConfigError(self._files.place(name), f"not JSON ({error})") from None

    def write_error(self, attempt: int, problem: JobProblem) -> None:
        """Record why an attempt ended without a commit."""
        with suppress(StoreError):
            self._ship(attempt)
        self._files.put(self._name(attempt, "error.json"), canonical_json(problem))

    def read_error(self, attempt: int) -> JobProblem | None:
        """Return why an attempt failed; None without a record, ArtifactCorruptError if damaged."""
        name = self._name(attempt, "error.json")
        data = self._files.get(name)
        try:
            return None if data is None else JobProblem.model_validate_json(data)
        except ValidationError as error:
            reason = str(error).splitlines()[0]
            raise ArtifactCorruptError(f"{self._files.place(name)}: {reason}") from error

    def read_beat(self, attempt: int) -> Beat | None:
        """Return an attempt's last heartbeat, or None; an `OSError` does not mean it is dead."""
        self._ship(attempt)
        name = self._name(attempt, "heartbeat")
        return parse_beat(self._files.get(name), self._files.place(name))

    def read_samples(self, attempt: int) -> dict[int, bytes]:
        """Return the samples that an attempt kept, by step; see `infra.tracking.samples`."""
        self._ship(attempt)
        found: dict[int, bytes] = {}
        for each in self._files.listed(f"{self._name(attempt, SAMPLES_DIR)}/"):
            path = PurePosixPath(each.name)
            if path.parent.name == SAMPLES_DIR and path.suffix == ".json" and path.stem.isdigit():
                data = self._files.get(each.name)
                found |= {int(path.stem): data} if data is not None else {}
        return found

    @abstractmethod
    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes `start` to `end` of an attempt's journal segment; empty if there is none."""

    @abstractmethod
    def journal_bytes(self, attempt: int) -> int:
        """Return the size of the complete lines of an attempt's journal segment."""

    def local_dir(self, attempt: int) -> Path:
        """Return an attempt's own directory on this machine, created if absent.

        Watchers see its heartbeat, journal and samples; an output in it is published by rename.
        """
        path = self._local_path(attempt)
        make_directories(path)
        return path

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """Return a generation's checkpoint directory, shared by its attempts; it may not exist.

        With `adopted` it has its own name, so that it can be filled before any attempt is held.
        """
        return self._directory / f"steps-{generation}{f'-{adopted.digest[:12]}' if adopted else ''}"

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """Fetch the newest valid checkpoint up to step `last`, and publish later ones from now on.

        The attempt is held and has opened its journal, which counts up to step `last`; checkpoints
        of later steps come from a replaced attempt and are removed. `before_publish` is called
        before a checkpoint becomes visible; `FencedError` ends the sharing. Raises `OSError` if the
        existing checkpoints cannot be read.
        """
        remove_steps_after(steps, last)

    @abstractmethod
    def fetch_steps(self, steps: Path, last: int) -> None:
        """Fetch the newest valid checkpoint up to step `last`; raises as `share_steps`."""

    @abstractmethod
    def ship_steps(self, steps: Path) -> None:
        """Make the checkpoints of a directory visible to others before returning."""

    def step_numbers(self, steps: Path) -> list[int]:
        """Return the steps with a checkpoint, ascending; not verified."""
        return list(step_directories(steps))

    def prune(self, attempts: Sequence[int], steps: Path) -> None:
        """Remove what only an unfinished stage needs; called after its commit, may be repeated.

        Step checkpoints and subdirectories of attempts go, except logs and samples. Specifications,
        errors, stacks, heartbeats and journals stay. Raises `OSError` if some files remain.
        """
        remove_directory(steps)
        for attempt in attempts:
            path = self._local_path(attempt)
            make_directories(path)
            for inner in path.iterdir():
                if _is_directory(inner) and inner.name != SAMPLES_DIR:
                    _remove_but_logs(inner)

    @abstractmethod
    def _ship(self, attempt: int) -> None:
        """Make the files that an attempt has written on this machine visible to watchers."""

    def _local_path(self, attempt: int) -> Path:
        return self._directory / f"attempt-{attempt}"

    def _name(self, attempt: int, name: str) -> str:
        return f"work/{self._fingerprint}/attempt-{attempt}/{name}"


class LocalChannel(WorkChannel):
    """`WorkChannel` in a directory that the job and its watchers share, so nothing is shipped."""

    def __init__(self, files: Files, root: Path, fingerprint: str) -> None:
        super().__init__(files, fingerprint, root / "work" / fingerprint)

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """See `WorkChannel.read_journal`."""
        return read_stretch(self._local_path(attempt) / "journal.jsonl", start, end)

    def journal_bytes(self, attempt: int) -> int:
        """See `WorkChannel.journal_bytes`."""
        return self.read_journal(attempt).rfind(b"\n") + 1

    def fetch_steps(self, steps: Path, last: int) -> None:
        """See `WorkChannel.fetch_steps`."""

    def ship_steps(self, steps: Path) -> None:
        """See `WorkChannel.ship_steps`."""

    def _ship(self, attempt: int) -> None:
        """See `WorkChannel`."""


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove_but_logs(directory: Path) -> None:
    for path in directory.iterdir():
        if _is_directory(path):
            _remove_but_logs(path)
        elif path.suffix != ".log":
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty: it holds a log
        directory.rmdir()
