"""Background thread that brings a tracker up to date with ledger, journals and commits.

Promises: only `close` waits for the tracker, for a bounded time. The tracker is opened when there
is something to send. What was not sent, because the tracker was unreachable or a process died, is
sent at the next contact by any process of the home. A metric appears in the tracker once. If the
tracker fails, one line is logged and it is not called for a while. An entry that fails while the
tracker answers is set aside with one line: the others go on, and it is retried with growing delays
and by later runs.
Does not promise: that two processes which send one run at the same moment do not both send it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from infra.errors import JournalError, PipelineError
from infra.host.processes import num_bytes_read
from infra.redact import redact
from infra.tracking.journal import JournalRecord, StageHistory
from infra.tracking.ledger import Ledger, RunEntry
from infra.tracking.promotion import PROMOTION
from infra.tracking.shown_stage import register, show_stage
from infra.tracking.tracker import (
    MetricPoint,
    RunState,
    TrackedRun,
    Tracker,
    TrackerRefusedError,
)

SHIP_EVERY_S = 2.0
RETRY_AFTER_S = 60.0
MAX_ASIDE_S = 3600.0
"""Longest delay between two tries of a failing entry; the delay doubles each time."""
MAX_REASON_CHARS = 200
LOOK_EVERY_S = 1.0
MOVED_BYTES = 2**16
"""An upload is alive if the process reads this much within the deadline; polling reads less."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Aside:
    """Next try of a failing entry, on the monotonic clock, and the delay before it."""

    due_at: float
    wait_s: float


class Shipper:
    """Sends the runs of one ledger to one tracker, at most one round of calls per `ship_every_s`.

    A tracker that failed is not called for `retry_after_s`.
    """

    def __init__(
        self,
        ledger: Ledger,
        tracker: Tracker,
        history: StageHistory,
        *,
        ship_every_s: float = SHIP_EVERY_S,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        self._ledger = ledger
        self._tracker = tracker
        self._history = history
        self._ship_every_s = ship_every_s
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()
        self._entries: dict[str, RunEntry] = {}
        self._news: dict[str, None] = {}
        self._is_news = threading.Event()
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._in_touch = False
        self._silent_until = 0.0
        self._warned = False
        self._aside: dict[str, _Aside] = {}
        self._said: set[tuple[str, str]] = set()
        self._telling: RunEntry | None = None
        self._is_uploading = False
        self._run_ids: dict[str, str] = {}
        self._states: dict[str, RunState] = {}
        self._positions: dict[str, str] = {}

    def begin(self) -> None:
        """Start sending what earlier runs left unsent."""
        try:
            if self._tracker.is_absent():
                self._ledger.forget()
        except OSError as error:
            _log.warning("tracking: cannot tell what was not sent yet: %s", error)
        if any(self._ledger.pending()):
            self._wake()

    def find(self, key: str) -> RunEntry | None:
        """Return the newest entry of a run; None if it is unknown."""
        with self._lock:
            return self._entries.get(key) or self._ledger.find(key)

    def is_settled(self, key: str) -> bool:
        """True if the tracker knows everything about a run."""
        return self._ledger.is_settled(key)

    def put(self, entry: RunEntry) -> None:
        """Queue a run; it is kept until it is sent."""
        with self._lock:
            # Under one lock: otherwise the thread could send the entry before its key is queued,
            # and then send it again.
            self._entries[entry.key] = entry
            self._news[entry.key] = None
            if entry.key in self._aside:  # the entry changed, so it may succeed now
                self._aside[entry.key] = replace(self._aside[entry.key], due_at=time.monotonic())
            try:
                self._ledger.put(entry)
            except OSError as error:
                _log.warning("tracking: cannot record %s for later: %s", entry.name, error)
        self._wake()

    def journal_grew(self, key: str) -> None:
        """Queue a stage with new journal records, if it was put before."""
        with self._lock:
            if key in self._entries:
                self._news[key] = None
        self._wake()

    def finish(self) -> None:
        """Send the rest at once, then end the thread; does not wait."""
        self._is_closing.set()
        self._is_news.set()

    def close(self, deadline_s: float, upload_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Send the rest, and wait for a bounded time.

        Args:
            deadline_s: longest wait without upload progress.
            upload_s: longest total wait while a report or model upload makes progress.
            waited_s: time since `finish` that counts towards both.
        """
        if self._thread is None:
            return
        self.finish()
        began_at = time.monotonic() - waited_s
        moved_at = max(began_at, time.monotonic() - max(0.0, deadline_s - LOOK_EVERY_S))
        moved_bytes, is_said = num_bytes_read(), False
        # Not `join`: if Ctrl-C interrupts it, CPython 3.11 takes the thread for dead.
        while not self._has_ended.wait(min(LOOK_EVERY_S, deadline_s)):
            now, num_bytes = time.monotonic(), num_bytes_read()
            is_moving = self._is_uploading and num_bytes - moved_bytes >= MOVED_BYTES
            if is_moving and now - began_at < upload_s:
                moved_at, moved_bytes = now, num_bytes
                if not is_said and now - began_at >= deadline_s:
                    is_said = True
                    _log.warning(
                        "tracking: files are on their way to %s; waiting while they move, up to "
                        "%g s; after Ctrl-C the next run sends them",
                        *(redact(self._tracker.address), upload_s),
                    )
            elif now - moved_at >= deadline_s:
                if self._telling is not None:  # it took so long that the next run sends it last
                    self._note_aside(self._telling)
                _log.warning(
                    "tracking: %s did not take everything within %.0f s; the next run sends the "
                    "rest",
                    *(redact(self._tracker.address), now - began_at),
                )
                return

    def _wake(self) -> None:
        self._is_news.set()
        if self._thread is None:
            self._has_ended.clear()
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        closing = False
        try:
            while not closing:
                self._is_news.wait(self._retry_after_s if self._news else None)
                self._is_news.clear()
                closing = self._is_closing.is_set()
                if closing or time.monotonic() >= self._silent_until:
                    failure = _failure(self._round)
                    if failure is not None:
                        self._is_away("be told", failure)
                if not closing:
                    self._is_closing.wait(self._ship_every_s)
        finally:
            self._has_ended.set()

    def _round(self) -> None:
        if not self._in_touch:
            self._adopt()
            self._in_touch = bool(self._news) and self._meets("answer")
        for entry in self._due():
            if not self._in_touch:
                return
            with self._lock:
                self._news.pop(entry.key, None)
                newest = self._entries[entry.key]  # it may have been put again since
            self._telling = newest
            failure = _failure(partial(self._tell, newest))
            self._telling = None
            if failure is None:
                self._warned = False
                self._aside.pop(entry.key, None)
                continue
            with self._lock:
                self._news[entry.key] = None
            if isinstance(failure, TrackerRefusedError) or self._meets(
                f"take {entry.name}", failure
            ):
                self._set_aside(newest, failure)

    def _due(self) -> list[RunEntry]:
        """Return the entries to send now, in order.

        Stages come before pipeline runs, whose end is sent after their stages. Older commits come
        first: a producer before its readers, and of two models the later one must get the alias.
        Entries that failed before, here or in another process, come last.
        """
        now = time.monotonic()
        with self._lock:
            entries = [
                self._entries[key]
                for key in self._news
                if key not in self._aside or now >= self._aside[key].due_at
            ]
        aside = self._ledger.aside()

        def turn(entry: RunEntry) -> tuple[bool, bool, bool, str]:
            is_aside = entry.key in aside or entry.key in self._aside
            return is_aside, not entry.fingerprint, not entry.committed_at, entry.committed_at

        return sorted(entries, key=turn)

    def _meets(self, what: str, failure: Exception | None = None) -> bool:
        """Return whether the tracker answers; if not, log that `what` failed for this reason."""
        silence = _failure(self._meet)
        if silence is None or isinstance(silence, TrackerRefusedError):
            return True
        self._is_away(what, failure or silence)
        return False

    def _is_away(self, what: str, error: Exception) -> None:
        _log.debug("tracking", exc_info=error)
        self._silent_until = time.monotonic() + self._retry_after_s
        self._in_touch = False
        if not self._warned:
            self._warned = True
            _log.warning(
                "tracking: %s could not %s (%s); it is kept in %s and told later, nothing is lost",
                *self._words(what, error),
                self._ledger.directory,
            )

    def _set_aside(self, entry: RunEntry, error: Exception) -> None:
        _log.debug("tracking", exc_info=error)
        if isinstance(error, TrackerRefusedError):  # the run may have been deleted
            for known in (self._run_ids, self._states, self._positions):
                known.pop(entry.key, None)
        with self._lock:
            before = self._aside.get(entry.key)
            wait_s = min(2 * before.wait_s, MAX_ASIDE_S) if before else self._retry_after_s
            is_news = self._entries[entry.key] is not entry
            due_at = time.monotonic() + (0.0 if is_news else wait_s)
            self._aside[entry.key] = _Aside(due_at, wait_s)
        self._note_aside(entry)
        cause = (entry.key, type(error).__name__)
        if cause not in self._said:
            self._said.add(cause)
            _log.warning(
                "tracking: %s did not %s (%s); the others go on, it is kept in %s and tried again",
                *self._words(f"take {entry.name}", error),
                self._ledger.directory,
            )

    def _note_aside(self, entry: RunEntry) -> None:
        try:
            self._ledger.set_aside(entry.key)
        except OSError as error:
            _log.debug("tracking: %s comes in its turn: %s", entry.name, error)

    def _words(self, what: str, error: Exception) -> tuple[str, str, str]:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        # Errors of this project are not cut, because they end with the remedy.
        num_chars = None if isinstance(error, PipelineError) else MAX_REASON_CHARS
        return redact(self._tracker.address), what, redact(said)[:num_chars]

    def _adopt(self) -> None:
        """Queue what dead processes and failed contacts left unsent."""
        for entry in self._ledger.pending():
            failure = _failure(partial(self._take_up, entry))
            if failure is not None:
                _log.debug("tracking: %s is left alone: %s", entry.name, failure)

    def _take_up(self, entry: RunEntry) -> None:
        left = self._resolve(entry)
        with self._lock:
            if left and entry.key not in self._entries:
                self._entries[entry.key] = left
                self._news[entry.key] = None

    def _meet(self) -> None:
        """Contact the tracker; a different server than before has to be sent everything."""
        if self._ledger.check_origin(self._tracker.origin()):
            for known in (self._run_ids, self._states, self._positions):
                known.clear()
            with self._lock:
                self._news.update(dict.fromkeys(self._entries))
            self._adopt()

    def _resolve(self, entry: RunEntry) -> RunEntry | None:
        """Return the real state of another process's pending run; None if there is no news."""
        is_open = bool(entry.fingerprint) and entry.state != "FINISHED"
        if is_open and (record := self._history.commit(entry.fingerprint, entry.generation)):
            return entry.committed(record)
        if entry.state == "RUNNING":
            if not entry.owner.is_gone():
                return None
            entry = entry.model_copy(update={"state": "KILLED"})
        if is_open:
            state, _, position = entry.told.partition(" ")
            if state == entry.state and not self._read(entry, position)[0]:
                return None
        return entry

    def _tell(self, entry: RunEntry) -> None:
        run_id = self._open(entry)
        position = ""
        if entry.fingerprint:
            before = self._positions.get(entry.key)
            before = self._tracker.position(run_id) if before is None else before
            records, position = self._read(entry, before)
            if position != before:
                self._tracker.log_metrics(run_id, _points(records), position)
            self._positions[entry.key] = position
        if entry.state == "FINISHED" or self._states.get(entry.key) != entry.state:
            self._send_state(entry, run_id)
            self._states[entry.key] = entry.state
        told = entry.model_copy(update={"run_id": run_id, "told": f"{entry.state} {position}"})
        with self._lock:
            if self._entries[entry.key] is not entry or entry.state == "RUNNING":
                return  # it changed meanwhile
            # A killed or failed stage stays pending: its job may continue or start again.
            if entry.state == "FINISHED" or not entry.fingerprint:
                self._ledger.settle(told)
            else:
                self._ledger.put(told)

    def _open(self, entry: RunEntry) -> str:
        run_id = self._run_ids.get(entry.key)
        if run_id is None:
            parent = self.find(entry.parent) if entry.parent else None
            run_id = self._run_ids[entry.key] = self._tracker.open_run(
                TrackedRun(
                    key=entry.key,
                    name=entry.name,
                    parent_id=self._open(parent) if parent else None,
                    params=entry.params,
                    tags=entry.tags,
                    inputs=entry.inputs,
                )
            )
        return run_id

    def _read(self, entry: RunEntry, position: str) -> tuple[list[JournalRecord], str]:
        try:
            return self._history.records(entry.fingerprint, position, entry.generation)
        except JournalError:
            # The journal was replaced. Sending all of it causes no duplicates.
            return self._history.records(entry.fingerprint, "", entry.generation)

    def _upload(self, send: Callable[[], object]) -> None:
        self._is_uploading = True
        try:
            send()
        finally:
            self._is_uploading = False

    def _send_state(self, entry: RunEntry, run_id: str) -> None:
        tags: dict[str, str] = {}
        if entry.output is not None:
            shown = entry.output.model_dump(include={"digest", "kind", "uri"})
            tags = {f"output.{name}": value for name, value in shown.items()}
            if entry.output.kind == PROMOTION:
                self._upload(partial(register, self._tracker, self._history, entry, run_id))
        for label, key in entry.stages.items():
            stage = self.find(key)
            stage_id = self._run_ids.get(key) or (stage and stage.run_id)
            if stage and not stage_id and key not in self._aside:
                stage_id = self._open(stage)  # not sent yet
            if stage_id:
                tags[f"run.{label}"] = stage_id
        if entry.files is not None and entry.files.is_dir():
            self._upload(partial(self._tracker.log_files, run_id, entry.files, "report"))
        if entry.fingerprint and entry.state != "RUNNING":
            show_stage(self._tracker, self._history, entry, run_id)
        self._tracker.set_state(run_id, entry.state, tags, entry.metrics)


def _failure(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001  process boundary: a tracker's failure ends no run
        return error
    return None


def _points(records: list[JournalRecord]) -> list[MetricPoint]:
    return [
        MetricPoint(name, value, record.step or 0, record.time_ms)
        for record in records
        if record.kind == "metrics"
        for name, value in record.values.items()
    ]
