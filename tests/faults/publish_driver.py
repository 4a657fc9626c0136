"""A publish and a commit, with one storage call after the other failing.

A program and no test module: its forks need a process without threads. Prints its figures as JSON.

    kill       SIGKILL at the n-th call; a fresh process does the same work
    fail 5     the n-th call fails with that errno
    read 5     the n-th call of a look-up and a use that reads fails
    order      what a power loss could take away
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from storage_calls import KILL, every_call, traced, watched
from sync_order import NAMES, not_durable

from infra.store.artifacts import verify_directory
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage

FINGERPRINT = "f" * 64
OS_ERROR, ABSENT = 10, 12
"""Exit codes: an `OSError` of the errno that was injected; what was committed seemed not to be."""


def work(root: Path, source: Path) -> CommitRecord:
    store = LocalStorage(root)
    (source / "sub").mkdir(parents=True, exist_ok=True)
    (source / "a").write_text("weights")
    (source / "sub/b").write_text("more")
    artifact = store.publish(source, "model")
    number = len(store.attempts.entries(FINGERPRINT))
    attempt = store.attempts.hold(FINGERPRINT, Holder(id=uuid.uuid4().hex, process="x"), number)
    return store.commit(
        attempt,
        CommitRecord(
            fingerprint=FINGERPRINT,
            stage="sft",
            artifact=artifact,
            attempt=0,
            committed_at="2026-01-01T00:00:00Z",
        ),
    )


def state_of(root: Path) -> str:
    """What a reader sees; raises if it sees anything invalid."""
    visible = [d for d in (root / "artifacts/model").glob("*") if not d.name.startswith(".")]
    for directory in visible:
        assert verify_directory(directory, kind="model").digest == directory.name
    record = LocalStorage(root).lookup(FINGERPRINT)
    if record is not None:
        assert LocalStorage(root).local_copy(record.artifact) in visible
        return "committed"
    return "published" if visible else "nothing"


def told(do: Callable[[], object], error: int) -> Callable[[], None]:
    """What the caller of `do` is told becomes the exit code."""

    def run() -> None:
        try:
            do()
        except OSError as problem:
            os._exit(OS_ERROR if problem.errno == error else 1)

    return run


class Place:
    """A store and the output of a job, which may lie on another disk."""

    def __init__(self, root: Path, source: Path) -> None:
        self.root, self.source = root / "store", source / "out"
        self.bases = [root, source]
        self.digest = work(self.root, self.source).artifact.digest
        self.clear()

    def work(self) -> None:
        work(self.root, self.source)

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.source, ignore_errors=True)

    def check_rerun(self) -> None:
        """A fresh process commits the same."""
        assert watched(self.work, frozenset(), lambda call: 0) == 0
        assert state_of(self.root) == "committed"
        record = LocalStorage(self.root).lookup(FINGERPRINT)
        assert record is not None
        assert record.artifact.digest == self.digest


def kills(place: Place) -> dict[str, object]:
    num_points, states = 0, set[str]()
    for point in every_call(place.work, place.bases, KILL, place.clear):
        assert point.code == -9
        states.add(state_of(place.root))
        place.check_rerun()
        num_points += 1
    return {"points": num_points, "states": sorted(states)}


def failures(place: Place, error: int) -> dict[str, object]:
    num_points, swallowed = 0, set[str]()
    for point in every_call(told(place.work, error), place.bases, error, place.clear):
        state = state_of(place.root)
        if point.code == 0:
            assert state == "committed", point
            swallowed.add(f"{point.call.name} {Path(point.call.paths[-1]).name[:5]}")
        else:
            assert point.code == OS_ERROR, point
            linked = any(Path(c.paths[-1]).name == "1" for c in point.before if "link" in c.name)
            assert (state == "committed") == linked, point
        place.check_rerun()
        num_points += 1
    return {"points": num_points, "swallowed": sorted(swallowed)}


def reads(place: Place, error: int) -> dict[str, object]:
    place.work()

    def use() -> None:
        store = LocalStorage(place.root)
        record = store.lookup(FINGERPRINT)
        if record is None:
            os._exit(ABSENT)
        store.local_copy(record.artifact)

    num_points = harmless = 0
    for point in every_call(told(use, error), place.bases, error, lambda: None, changes=False):
        assert point.code in {0, OS_ERROR}, point
        harmless += point.code == 0
        num_points += 1
    return {"points": num_points, "harmless": harmless}


def order(place: Place) -> dict[str, object]:
    def visible(path: str) -> bool:
        entry = Path(path)
        return entry.name == place.digest or (
            entry.parent.name == FINGERPRINT and entry.name.isdigit()
        )

    calls = traced(place.work, place.bases)
    named = sum(call.name in NAMES and visible(call.paths[-1]) for call in calls)
    return {"named": named, "not_durable": not_durable(calls, visible)}


def main(root: str, source: str, what: str, how: str = "0") -> None:
    place = Place(Path(root), Path(source))
    match what:
        case "kill":
            figures = kills(place)
        case "fail":
            figures = failures(place, int(how))
        case "order":
            figures = order(place)
        case _:
            figures = reads(place, int(how))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
