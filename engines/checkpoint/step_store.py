"""Step checkpoints of one stage on disk; the newest valid one is used to resume.

Promises: a checkpoint appears under its name only when it is durable and its manifest verifies; a
process killed at any point leaves the older ones usable; rotation keeps at least two; a damaged
checkpoint is skipped with a warning, while a read error is raised; a step requested by number is
never replaced by another. Does not promise: concurrent publishers.

    <root>/step-00000050/checkpoint/...   files of the engine
                         trainer.json     `TrainerState`
                         manifest.json    written last
"""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.errors import CheckpointError
from infra.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError
from infra.store.artifacts import build_manifest, verify_directory, write_manifest
from infra.store.atomic import (
    make_directories,
    publish_directory,
    remove_abandoned,
    remove_directory,
    temporary_sibling,
)
from infra.store.canonical import canonical_json
from infra.store.step_directories import STEP_KIND, newest_valid, step_directories, verify_step
from infra.waiting import FULL_DISK, when_there_is_room

CHECKPOINT_DIR = "checkpoint"
TRAINER_NAME = "trainer.json"
_MIN_KEEP = 2


@dataclass(frozen=True)
class TrainerState:
    """State of a trainer besides its engine's; the data order is a pure function of `step`."""

    step: int
    values: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepCheckpoint:
    """A verified checkpoint; `path` is the directory of the engine's files."""

    step: int
    path: Path
    state: TrainerState


class StepCheckpoints:
    """The step checkpoints below `root`, which all attempts of a stage share.

    The newest `keep`, at least 2, are kept. `first_bytes` is the expected size of a checkpoint.
    `before_publish` is called before a complete one is published, and may raise to prevent that.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        first_bytes: int = 0,
        before_publish: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < _MIN_KEEP:
            raise ValueError(f"keep is {keep}: the newest may be damaged, so keep at least two")
        self._root = root
        self._keep = keep
        self._first_bytes = first_bytes
        self._before_publish = before_publish

    def beside(self, name: str) -> "StepCheckpoints":
        """Return a separate set in a subdirectory that a resume ignores.

        Its first checkpoint waits for as much free disk space as the newest one here takes.
        """
        return StepCheckpoints(
            self._root / name, self._keep, self._newest_bytes(), self._before_publish
        )

    def save(self, step: int, write: Callable[[Path], None], state: TrainerState) -> StepCheckpoint:
        """Publish the files that `write` puts into its argument, then remove old checkpoints.

        Other content of the same step is replaced; an error before that leaves it untouched.

        Raises:
            DeadlineError: the disk never had as much room as the newest checkpoint takes.
            OSError: the disk failed or became full.
            PipelineError: raised by `before_publish`.
        """
        if state.step != step:
            raise ValueError(f"the trainer is at step {state.step}, the checkpoint at {step}")
        make_directories(self._root)
        remove_abandoned(self._root)
        when_there_is_room(self._check_room, str(self._root))
        tmp = temporary_sibling(self._root / f"step-{step:08d}")
        try:
            (tmp / CHECKPOINT_DIR).mkdir(parents=True)
            self._write(write, tmp)
            (tmp / TRAINER_NAME).write_bytes(
                canonical_json({"step": state.step, "values": dict(state.values)}) + b"\n"
            )
            manifest = build_manifest(tmp, STEP_KIND)
            write_manifest(tmp, manifest)
            self._before_publish()
            final = self._publish(step, tmp, manifest.digest)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        for paths in [*step_directories(self._root).values()][: -self._keep]:
            for path in paths:
                remove_directory(path)
        return StepCheckpoint(step, final / CHECKPOINT_DIR, state)

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints, ascending; they are not verified."""
        return list(step_directories(self._root))

    def latest_valid(self, last: int | None = None) -> StepCheckpoint | None:
        """Return the newest intact checkpoint up to step `last`; None if no step up to it exists.

        Raises:
            CheckpointError: all checkpoints up to `last` are damaged.
            OSError: one could not be read.
        """
        try:
            newest = newest_valid(self._root, last)
        except ArtifactCorruptError as error:
            raise CheckpointError(str(error)) from error
        return _read(newest[1]) if newest else None

    def load(self, step: int) -> StepCheckpoint:
        """Return that step's verified checkpoint; `CheckpointError` if it is absent or damaged."""
        try:
            found = _read(verify_step(self._root, step)[0])
        except ArtifactError as error:
            others = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(f"step {step}: {error}; other steps: {others}") from error
        if found.step != step:
            raise CheckpointError(f"step {step}: {found.path} holds step {found.step}")
        return found

    def _check_room(self) -> None:
        """Check free space before the ranks start, as they cannot repeat a joint write."""
        free, needed = shutil.disk_usage(self._root).free, self._newest_bytes()
        if free <= needed:
            raise OSError(
                errno.ENOSPC, f"{free} bytes are free, the newest checkpoint has {needed}"
            )

    def _newest_bytes(self) -> int:
        """Return the size of the newest checkpoint, or the expected size of the first."""
        newest = [*step_directories(self._root).values()][-1:]
        return sum(_num_bytes(paths[-1]) for paths in newest) or self._first_bytes

    def _write(self, write: Callable[[Path], None], tmp: Path) -> None:
        """Call `write`; add the free and the needed bytes to the text of a disk-full error."""
        try:
            write(tmp / CHECKPOINT_DIR)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            written = _num_bytes(tmp)
            room, newest = written + shutil.disk_usage(self._root).free, self._newest_bytes()
            needed = f"{newest}" if newest > written else f"more than {written}"
            said = f"{error.strerror}: a checkpoint needs {needed} bytes, {room} were free"
            raise OSError(error.errno, said, str(self._root)) from error

    def _publish(self, step: int, tmp: Path, digest: str) -> Path:
        """Give a complete checkpoint its name, then remove other content of the same step."""
        there = []
        for path in step_directories(self._root).get(step, []):
            try:
                if verify_directory(path, kind=STEP_KIND).digest == digest:
                    return path
                there.append(path)
            except (ArtifactNotFoundError, ArtifactCorruptError):
                remove_directory(path)
        final = self._root / f"step-{step:08d}"
        if final.exists():
            final = final.with_name(f"{final.name}-{digest[:12]}")
        publish_directory(tmp, final)
        for path in there:
            remove_directory(path)
        return final


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*"))


def _read(directory: Path) -> StepCheckpoint:
    content = json.loads((directory / TRAINER_NAME).read_bytes())
    state = TrainerState(content["step"], content["values"])
    return StepCheckpoint(state.step, directory / CHECKPOINT_DIR, state)
