"""`work/<fingerprint>/` of a store in a bucket, and the attempts' directories on this machine.

    work/<fingerprint>/attempt-<n>/spec.json, error.json    objects
                                   heartbeat, stacks.txt, journal/   see `infra.store.s3.mirror`
                       steps-<g>/                                    see `infra.store.s3.mirror`
    with-steps/<fingerprint>                                         stages that may have steps

Promises: as `infra.store.work_channel`. A reader sees writes of its own process at once, those of
others after `mirror.SHIP_EVERY_S`, and a checkpoint after its upload. A local directory belongs to
one log in the bucket and is removed before the stage is computed again after garbage collection.
Does not promise: to merge checkpoint parts of several machines; the sharing one needs all files.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from infra import env
from infra.host.records import file_lock
from infra.store.atomic import atomic_write_bytes, make_directories, remove_directory
from infra.store.canonical import sha256_json
from infra.store.s3 import mirror
from infra.store.s3.mirror import JournalChunks, SharedSteps, StepsShipper
from infra.store.s3.objects import Objects
from infra.store.stage_spec import Adoption
from infra.store.work_channel import WorkChannel, prune_attempt, steps_name

_DIGITS = 12
_WITH_STEPS = "with-steps"
_LOG_MARK = "log"
LOCK_DEADLINE_S = 60.0


class S3Channel(WorkChannel):
    """`WorkChannel` of one fingerprint in a bucket; each access ships what this process wrote."""

    def __init__(self, objects: Objects, fingerprint: str) -> None:
        super().__init__(objects, fingerprint)
        self._objects = objects
        self._root = f"work/{fingerprint}"
        self._directory = _local(objects) / fingerprint
        self._is_of_this_log = False
        self._shippers: list[StepsShipper] = []
        self._journals: dict[int, JournalChunks] = {}

    @staticmethod
    def with_steps(objects: Objects) -> list[str]:
        """See `Storage.with_steps`."""
        here = {path.parent.parent.name for path in _local(objects).glob("*/steps-*/step-*")}
        there = {each.name.rpartition("/")[2] for each in objects.listed(f"{_WITH_STEPS}/")}
        return sorted(here | there)

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """See `WorkChannel.read_journal`."""
        return self._journal(attempt).read(start, end)

    def journal_bytes(self, attempt: int) -> int:
        """See `WorkChannel.journal_bytes`; only shipped lines count."""
        chunks = self._journal(attempt)
        chunks.refresh()
        return chunks.num_bytes

    def local_dir(self, attempt: int) -> Path:
        """See `WorkChannel.local_dir`."""
        self._leave_what_was()
        path = self._local_path(attempt)
        mirror.mirror(self._objects, f"{self._root}/attempt-{attempt}", path)
        return path

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """See `WorkChannel.steps_dir`."""
        self._leave_what_was()
        return self._directory / steps_name(generation, adopted)

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """See `WorkChannel.share_steps`; a thread ships checkpoints while the job goes on."""
        super().share_steps(attempt, steps, last, before_publish)
        self.fetch_steps(steps, last)
        self._mark_steps()

        def before_manifest() -> None:
            self._ship(attempt)
            before_publish()

        self._shippers.append(StepsShipper(self._shared(steps), before_manifest))

    def fetch_steps(self, steps: Path, last: int) -> None:
        """See `WorkChannel.fetch_steps`."""
        self._shared(steps).fetch(last)

    def ship_steps(self, steps: Path) -> None:
        """See `WorkChannel.ship_steps`."""
        self._mark_steps()
        self._shared(steps).ship()

    def step_numbers(self, steps: Path) -> list[int]:
        """See `WorkChannel.step_numbers`."""
        return self._shared(steps).numbers()

    def prune(self, attempts: Iterable[int], steps: Path) -> None:
        """See `WorkChannel.prune`; logs stay on the machine that wrote them."""
        for shipper in self._shippers:
            shipper.end()
        remove_directory(steps)
        self._shared(steps).remove()
        if not self._objects.children(f"{self._root}/steps-"):
            self._objects.delete([f"{_WITH_STEPS}/{self._fingerprint}"])
        for attempt in attempts:
            path = self._local_path(attempt)
            mirror.ship(path)
            mirror.end(path)
            make_directories(path)
            prune_attempt(path)

    def _leave_what_was(self) -> None:
        """Remove this machine's directory if it belongs to a log that the bucket no longer has."""
        first = None if self._is_of_this_log else self._objects.get(f"stages/{self._fingerprint}/0")
        if first is None:
            return
        mark, log = self._directory / _LOG_MARK, hashlib.sha256(first).hexdigest()
        with file_lock(self._directory.parent / ".lock", LOCK_DEADLINE_S):
            if mark.exists() and mark.read_text("ascii") != log:
                mirror.end_below(self._directory)
                remove_directory(self._directory)
            make_directories(self._directory)
            atomic_write_bytes(mark, log.encode("ascii"))
        self._is_of_this_log = True

    def _shared(self, steps: Path) -> SharedSteps:
        return SharedSteps(self._objects, f"{self._root}/{steps.name}", steps)

    def _mark_steps(self) -> None:
        self._objects.touch(f"{_WITH_STEPS}/{self._fingerprint}")

    def _journal(self, attempt: int) -> JournalChunks:
        self._ship(attempt)
        if attempt not in self._journals:
            name = f"{self._root}/attempt-{attempt}"
            self._journals[attempt] = JournalChunks(self._objects, name)
        return self._journals[attempt]

    def _ship(self, attempt: int) -> None:
        mirror.ship(self._local_path(attempt))

    def _local_path(self, attempt: int) -> Path:
        return self._directory / f"attempt-{attempt}"


def _local(objects: Objects) -> Path:
    return env.home() / "remote" / sha256_json(objects.address.uri)[:_DIGITS] / "work"
