"""Publishes and commits, killed by SIGKILL before the k-th line of our code, for every k.

A program and no test module: its forks need a process without threads. After every kill the
store must hold nothing invalid, and the same work done again must succeed.
"""

import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

from infra.store import atomic, stage_log, storage
from infra.store.artifacts import verify_directory
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage

FINGERPRINT = "f" * 64
TRACED_FILES = {atomic.__file__, storage.__file__, stage_log.__file__}
TRACED_FUNCTIONS = {"write_manifest"}
"""Where files and names change; the rest only reads and hashes."""


def work(store: LocalStorage, source: Path) -> CommitRecord:
    if not source.exists():
        (source / "sub").mkdir(parents=True)
    (source / "sub").mkdir(exist_ok=True)
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


def killed_before_line(number: int, store: LocalStorage, source: Path) -> bool:
    """Do the work in a fork; whether it was killed, rather than done first."""
    child = os.fork()
    if child == 0:
        passed = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal passed
            code = frame.f_code
            if code.co_filename not in TRACED_FILES and code.co_name not in TRACED_FUNCTIONS:
                return None
            if event == "line":
                passed += 1
                if passed == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work(store, source)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def state_of(root: Path, store: LocalStorage) -> str:
    """What a reader sees; raises if it sees anything invalid."""
    visible = [d for d in (root / "artifacts/model").glob("*") if not d.name.startswith(".")]
    for directory in visible:
        assert verify_directory(directory).digest == directory.name
    if LocalStorage(root).lookup(FINGERPRINT) is not None:
        return "committed"
    return "published" if visible else "nothing"


def main(root: Path, source: Path) -> None:
    states = set()
    number = 0
    digest = None
    while True:
        number += 1
        store = LocalStorage(root)  # knows nothing of the round before
        if not killed_before_line(number, store, source):
            break
        states.add(state_of(root, store))
        record = work(store, source)
        assert state_of(root, store) == "committed"
        digest = digest or record.artifact.digest
        assert record.artifact.digest == digest
        shutil.rmtree(root)
        shutil.rmtree(source, ignore_errors=True)
    print(json.dumps({"killed": number - 1, "states": sorted(states)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
