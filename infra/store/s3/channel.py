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
from contextlib import suppress
from pathlib import Path

from infra import env
from infra.errors import StoreError
from infra.host.records import file_lock
from infra.store.atomic import atomic_write_bytes, make_directories, remove_directory
from infra.store.canonical import canonical_json, sha256_json
from infra.store.heartbeat import Beat, checked_content, parse_beat
from infra.store.s3 import mirror
from infra.store.s3.mirror import JournalChunks, SharedSteps, StepsShipper
from infra.store.s3.objects import Objects
from infra.store.stage_spec import Adoption, StageSpec
from infra.store.step_directories import remove_steps_after
from infra.store.work_channel import (
    SAMPLES_DIR,
    JobProblem,
    parse_problem,
    parse_specification,
    prune_attempt,
    steps_name,
)

_DIGITS = 12
_WITH_STEPS = "with-steps"
_LOG_MARK = "log"
LOCK_DEADLINE_S = 60.0


class S3Channel:
    """`WorkChannel` of one fingerprint in a bucket."""

    def __init__(self, objects: Objects, fingerprint: str) -> None:
        self._objects = objects
        self._root = f"work/{fingerprint}"
        self._directory = _local(objects) / fingerprint
        self._fingerprint = fingerprint
        self._is_of_this_log = False
        self._shippers: list[StepsShipper] = []
        self._journals: dict[int, JournalChunks] = {}

    @staticmethod
    def with_steps(objects: Objects) -> list[str]:
        """See `Storage.with_steps`."""
        here = {path.parent.parent.name for path in _local(objects).glob("*/steps-*/step-*")}
        there = {each.name.rpartition("/")[2] for each in objects.listed(f"{_WITH_STEPS}/")}
        return sorted(here | there)

    def write_specification(self, spec: StageSpec) -> None:
        """See `WorkChannel.write_specification`; ships a journal that was started here first."""
        mirror.ship(self._local_path(spec.attempt))
        self._objects.put(self._name(spec.attempt, "spec.json"), canonical_json(spec))

    def read_specification(self, attempt: int) -> StageSpec:
        """See `WorkChannel.read_specification`."""
        name = self._name(attempt, "spec.json")
        return parse_specification(self._objects.get(name), self._objects.place(name))

    def write_error(self, attempt: int, problem: JobProblem) -> None:
        """See `WorkChannel.write_error`."""
        with suppress(StoreError):
            mirror.ship(self._local_path(attempt))
        self._objects.put(self._name(attempt, "error.json"), canonical_json(problem))

    def read_error(self, attempt: int) -> JobProblem | None:
        """See `WorkChannel.read_error`."""
        name = self._name(attempt, "error.json")
        return parse_problem(self._objects.get(name), self._objects.place(name))

    def read_beat(self, attempt: int) -> Beat | None:
        """See `WorkChannel.read_beat`."""
        mirror.ship(self._local_path(attempt))
        name = self._name(attempt, "heartbeat")
        data = self._objects.get(name)
        return parse_beat(data and checked_content(data), self._objects.place(name))

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """See `WorkChannel.read_journal`."""
        return self._journal(attempt).read(start, end)

    def read_samples(self, attempt: int) -> dict[int, bytes]:
        """See `WorkChannel.read_samples`."""
        mirror.ship(self._local_path(attempt))
        found: dict[int, bytes] = {}
        for each in self._objects.listed(f"{self._name(attempt, SAMPLES_DIR)}/"):
            step = each.name.rpartition("/")[2].removesuffix(".json")
            data = self._objects.get(each.name) if step.isdigit() else None
            if data is not None:
                found[int(step)] = data
        return found

    def journal_bytes(self, attempt: int) -> int:
        """Return the size of the shipped complete lines of an attempt's journal segment."""
        chunks = self._journal(attempt)
        chunks.refresh()
        return chunks.num_bytes

    def local_dir(self, attempt: int) -> Path:
        """See `WorkChannel.local_dir`."""
        self._leave_what_was()
        path = self._local_path(attempt)
        mirror.mirror(self._objects, self._name(attempt), path)
        return path

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """See `WorkChannel.steps_dir`."""
        self._leave_what_was()
        return self._directory / steps_name(generation, adopted)

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """See `WorkChannel.share_steps`; a thread ships checkpoints while the job goes on."""
        remove_steps_after(steps, last)
        self.fetch_steps(steps, last)
        self._mark_steps()

        def before_manifest() -> None:
            mirror.ship(self._local_path(attempt))
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
        self._objects.put(f"{_WITH_STEPS}/{self._fingerprint}", b"")

    def _journal(self, attempt: int) -> JournalChunks:
        mirror.ship(self._local_path(attempt))
        if attempt not in self._journals:
            self._journals[attempt] = JournalChunks(self._objects, self._name(attempt))
        return self._journals[attempt]

    def _local_path(self, attempt: int) -> Path:
        return self._directory / f"attempt-{attempt}"

    def _name(self, attempt: int, name: str = "") -> str:
        return f"{self._root}/attempt-{attempt}/{name}".rstrip("/")


def _local(objects: Objects) -> Path:
    return env.home() / "remote" / sha256_json(objects.address.uri)[:_DIGITS] / "work"
