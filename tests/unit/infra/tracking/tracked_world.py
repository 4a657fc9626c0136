"""A home with work to tell a tracker about, and a tracker that fails on request."""

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from infra.host.processes import ProcessIdentity
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking import shipper as shipper_module
from infra.tracking.journal import Journal, StageHistory
from infra.tracking.ledger import Ledger, Owner, RunEntry
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import (
    MetricPoint,
    TrackedRun,
    TrackerRefusedError,
    TrackerSettings,
)

CLOSE_S = 600.0
"""How long a test waits for a shipper, which is never so long: a deadline is missed on purpose."""
FINGERPRINT = "f" * 64
GONE = Owner(host=socket.gethostname(), process=ProcessIdentity(pid=2**22 - 1, started="0"))
MINE = Owner.this_process()
PARENT = RunEntry(key="a" * 64, name="run", owner=MINE, params={"seed": 1})
STAGE = RunEntry(
    key="b" * 64, name="sft", fingerprint=FINGERPRINT, parent=PARENT.key, owner=MINE,
    tags={"stage": "sft"},
)  # fmt: skip


class Away(JsonLinesTracker):
    """Fails on request, before or after it did what was asked."""

    away = False
    refuses = False
    lose_answer = False
    num_calls = 0

    def open_run(self, run: TrackedRun) -> str:
        self._answer()
        return super().open_run(run)

    def origin(self) -> str:
        self._answer()
        return super().origin()

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        self._answer()
        super().log_metrics(run_id, points, position)
        if self.lose_answer:
            self.lose_answer = False
            raise TimeoutError("no answer")

    def set_state(
        self, run_id: str, state: Any, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        self._answer()
        super().set_state(run_id, state, tags, metrics)

    def _answer(self) -> None:
        self.num_calls += 1
        if self.refuses:
            raise TrackerRefusedError("params are write-once")
        if self.away:
            raise ConnectionError("refused:\n  line 2\n  line 3")


class World:
    """A home with one stage's work, and trackers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        store = LocalStorage(home / "store")
        self.history = StageHistory(store)
        holder = Holder(id="test", process="test")
        self.attempt = store.attempts.hold(FINGERPRINT, holder, 0)
        self.journal = store.channel(FINGERPRINT).local_dir(0) / "journal.jsonl"
        self.tracker = Away(TrackerSettings(home / "server-1"))
        (home / "server-1").mkdir()

    def shipper(self, tracker: Away | None = None) -> Shipper:
        tracker = tracker or self.tracker
        return Shipper(self.ledger(tracker), tracker, self.history, ship_every_s=0.01,
                       retry_after_s=0.05)  # fmt: skip

    def ledger(self, tracker: Away | None = None) -> Ledger:
        return Ledger(self.home, (tracker or self.tracker).address, "store")

    def train(self, *steps: int) -> None:
        with Journal(self.journal) as journal:
            for step in steps:
                journal.metrics(step, {"train/loss": 1.0 / step})

    def publish(self, kind: str, **files: bytes) -> Artifact:
        out = self.home / "out"
        out.mkdir()
        (out / "config.json").write_bytes(b"{}")
        for name, data in files.items():
            (out / name.replace("_", ".")).write_bytes(data)
        return self.history.storage.publish(out, kind)

    def commit(self, kind: str = "policy", **files: bytes) -> CommitRecord:
        record = CommitRecord(
            fingerprint=FINGERPRINT, stage="sft", artifact=self.publish(kind, **files), attempt=0,
            metrics={"accuracy": 0.5}, committed_at="2026-01-01T00:00:00+00:00",
        )  # fmt: skip
        return self.history.storage.commit(self.attempt, record)

    def seen(self, entry: RunEntry = STAGE, tracker: Away | None = None) -> dict[str, Any]:
        return (tracker or self.tracker).run(entry.key)


def told(shipper: Shipper, *entries: RunEntry) -> None:
    for entry in entries:
        shipper.put(entry)
    shipper.close(CLOSE_S)


def warnings(caplog: pytest.LogCaptureFixture, of: str = shipper_module.__name__) -> list[str]:
    """What one logger warned of; threads of other tests may still say something of theirs."""
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == of and each.levelno >= logging.WARNING
    ]


def losses(*steps: int) -> list[tuple[str, int, float]]:
    return [("train/loss", step, 1.0 / step) for step in steps]


def finished(entry: RunEntry) -> RunEntry:
    return entry.model_copy(update={"state": "FINISHED"})
