"""Brings a tracker to where the ledger, the journals and the commits are, from its own thread.

Promises: nobody waits for the tracker but `close`, and that for a bounded time; nothing is opened
before there is something to tell; whatever could not be told, because the tracker was away or
because a process died, is told by the next contact, whoever makes it and whatever it came for;
a metric stands in the tracker once. A failure of the tracker is one line, and it is left alone
for a while then.
Does not promise: that two processes which tell one run at the same moment do not both send it.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from infra.errors import ArtifactError, JournalError, PipelineError
from infra.redact import redact
from infra.tracking.history import StageHistory
from infra.tracking.journal import JournalRecord
from infra.tracking.ledger import Ledger, RunEntry
from infra.tracking.promotion import CHALLENGER, INCUMBENT, PROMOTION, Decision
from infra.tracking.shown_stage import show_stage
from infra.tracking.tracker import (
    MetricPoint,
    ModelCandidate,
    RunState,
    TrackedRun,
    Tracker,
    TrackerRefusedError,
)

SHIP_EVERY_S = 2.0
RETRY_AFTER_S = 60.0
MAX_REASON_CHARS = 200

_log = logging.getLogger(__name__)


class Shipper:
    """Tells one tracker the runs of one ledger.

    Args:
        ledger: about this tracker.
        tracker: not opened before something is told.
        history: of the stages.
        ship_every_s: at most one round of calls in this time, in seconds.
        retry_after_s: seconds for which a tracker that failed is not asked again.
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
        self._run_ids: dict[str, str] = {}
        self._states: dict[str, RunState] = {}
        self._positions: dict[str, str] = {}

    def begin(self) -> None:
        """Take up what earlier runs left untold, if they did."""
        try:
            if self._tracker.is_absent():
                self._ledger.forget()
        except OSError as error:
            _log.warning("tracking: what is untold is not known: %s", error)
        if any(self._ledger.pending()):
            self._wake()

    def find(self, key: str) -> RunEntry | None:
        """A run as it was told last, or is to be told."""
        with self._lock:
            return self._entries.get(key) or self._ledger.find(key)

    def is_settled(self, key: str) -> bool:
        """Whether the tracker knows everything about a run."""
        return self._ledger.is_settled(key)

    def put(self, entry: RunEntry) -> None:
        """Tell a run, now or by the next contact."""
        with self._lock:
            # One step: an entry without its news would be told with another's, and then again.
            self._entries[entry.key] = entry
            self._news[entry.key] = None
            try:
                self._ledger.put(entry)
            except OSError as error:
                _log.warning("tracking: %s is not noted for later: %s", entry.name, error)
        self._wake()

    def journal_grew(self, key: str) -> None:
        """A stage of ours has new records; before it is put, that is no news of its own."""
        with self._lock:
            if key in self._entries:
                self._news[key] = None
        self._wake()

    def close(self, deadline_s: float) -> None:
        """Tell the rest, but not for ever.

        Args:
            deadline_s: how long to wait, in seconds.
        """
        if self._thread is None:
            return
        self._is_closing.set()
        self._is_news.set()
        # Not `join`: Ctrl-C in the middle of one has CPython 3.11 take the thread for dead.
        if not self._has_ended.wait(deadline_s):
            _log.warning(
                "tracking: %s did not take everything within %g s; the next run sends the rest",
                redact(self._tracker.address),
                deadline_s,
            )

    def _wake(self) -> None:
        self._is_news.set()
        if self._thread is None:
            self._has_ended.clear()
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._has_ended.set()

    def _serve(self) -> None:
        while True:
            self._is_news.wait(self._retry_after_s if self._news else None)
            self._is_news.clear()
            closing = self._is_closing.is_set()
            if closing or time.monotonic() >= self._silent_until:
                self._round()
            if closing:
                return
            self._is_closing.wait(self._ship_every_s)

    def _round(self) -> None:
        if not self._in_touch:
            self._adopt()
            self._in_touch = bool(self._news) and self._try("answer", self._meet)
        with self._lock:
            entries = [self._entries[key] for key in self._news]

        # Stages first: the end of a pipeline run is told when its stages are. Who made something
        # before who reads it, and the older first: of two models, that of the later commit is to
        # have the alias.
        def turn(entry: RunEntry) -> tuple[bool, bool, str]:
            return not entry.fingerprint, not entry.committed_at, entry.committed_at

        for entry in sorted(entries, key=turn):
            if not self._in_touch:
                return
            with self._lock:
                self._news.pop(entry.key, None)
                newest = self._entries[entry.key]  # it may have been put again since
            if not self._try(f"take {entry.name}", partial(self._tell, newest)):
                with self._lock:
                    self._news[entry.key] = None

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Do something with the tracker; whether it is there."""
        try:
            action()
        except (TrackerRefusedError, ArtifactError) as error:
            _log.warning("tracking: %s refused to %s: %s", *self._words(what, error))
            return True
        except Exception as error:  # noqa: BLE001  process boundary: a tracker's failure ends no run
            _log.debug("tracking", exc_info=error)
            self._silent_until = time.monotonic() + self._retry_after_s
            self._in_touch = False
            if not self._warned:
                self._warned = True
                _log.warning(
                    "tracking: %s could not %s (%s); it is kept in %s and told later, nothing is "
                    "lost",
                    *self._words(what, error),
                    self._ledger.directory,
                )
            return False
        self._warned = False
        return True

    def _words(self, what: str, error: Exception) -> tuple[str, str, str]:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return redact(self._tracker.address), what, redact(said)[:MAX_REASON_CHARS]

    def _adopt(self) -> None:
        """Take up what processes that died and failed contacts left."""
        for entry in self._ledger.pending():
            try:
                left = self._resolve(entry)
            except (PipelineError, OSError) as error:
                _log.debug("tracking: %s is left alone: %s", entry.name, error)
                continue
            with self._lock:
                if left and entry.key not in self._entries:
                    self._entries[entry.key] = left
                    self._news[entry.key] = None

    def _meet(self) -> None:
        """Look who answers; another server than before has to be told everything."""
        if self._ledger.check_origin(self._tracker.origin()):
            for known in (self._run_ids, self._states, self._positions):
                known.clear()
            with self._lock:
                self._news.update(dict.fromkeys(self._entries))
            self._adopt()

    def _resolve(self, entry: RunEntry) -> RunEntry | None:
        """A pending run of others as it really stands; None if there is nothing to tell."""
        if entry.fingerprint and entry.state != "FINISHED":
            record = self._history.commit(entry.fingerprint, entry.generation)
            if record is not None:
                return entry.committed(record)
        if entry.state == "RUNNING":
            if not entry.owner.is_gone():
                return None
            entry = entry.model_copy(update={"state": "KILLED"})
        if entry.fingerprint and entry.state != "FINISHED":
            state, _, position = entry.told.partition(" ")
            if state == entry.state and not self._read(entry, position)[0]:
                return None
        return entry

    def _tell(self, entry: RunEntry) -> None:
        """Bring the tracker to where one run is."""
        run_id = self._open(entry)
        position = self._send_journal(entry, run_id) if entry.fingerprint else ""
        if entry.state == "FINISHED" or self._states.get(entry.key) != entry.state:
            self._send_state(entry, run_id)
            self._states[entry.key] = entry.state
        told = entry.model_copy(update={"run_id": run_id, "told": f"{entry.state} {position}"})
        with self._lock:
            if self._entries[entry.key] is not entry or entry.state == "RUNNING":
                return  # it went on meanwhile
            # The job of a stage that was killed may go on, and that of a failed one start again.
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

    def _send_journal(self, entry: RunEntry, run_id: str) -> str:
        if entry.key not in self._positions:
            self._positions[entry.key] = self._tracker.position(run_id)
        records, position = self._read(entry, self._positions[entry.key])
        if position != self._positions[entry.key]:
            self._tracker.log_metrics(run_id, _points(records), position)
            self._positions[entry.key] = position
        return position

    def _read(self, entry: RunEntry, position: str) -> tuple[list[JournalRecord], str]:
        try:
            return self._history.records(entry.fingerprint, position, entry.generation)
        except JournalError:
            # Not the journal that was read before. Sending all of it doubles nothing.
            return self._history.records(entry.fingerprint, "", entry.generation)

    def _send_state(self, entry: RunEntry, run_id: str) -> None:
        tags = {}
        if entry.output is not None:
            tags = {
                "output.digest": entry.output.digest,
                "output.kind": entry.output.kind,
                "output.uri": entry.output.uri,
            }
            if entry.output.kind == PROMOTION:
                self._register(entry, run_id)
        for label, key in entry.stages.items():
            stage = self.find(key)
            if stage is not None and (stage_id := self._run_ids.get(key) or stage.run_id):
                tags[f"run.{label}"] = stage_id
        if entry.files is not None and entry.files.is_dir():
            self._tracker.log_files(run_id, entry.files, "report")
        if entry.fingerprint and entry.state != "RUNNING":
            show_stage(self._tracker, self._history, entry, run_id)
        self._tracker.set_state(run_id, entry.state, tags, entry.metrics)

    def _register(self, entry: RunEntry, run_id: str) -> None:
        """A committed promotion is what registers a model, whoever sees it first.

        The alias moves only from the incumbent that the model was compared with, if there is one:
        a decision that is told late takes nothing from a later champion.
        """
        if entry.output is None or "model" not in entry.inputs:
            return
        decision = Decision.read(self._history.storage.local_copy(entry.output))
        alias, model = decision.given_alias, entry.inputs["model"]
        if not alias:
            return
        bearer = self._tracker.incumbent(decision.model_name, decision.alias)
        if bearer is not None and bearer.artifact.digest == model.digest:
            return
        beaten = decision.comparison.incumbent_digest if decision.comparison else None
        if decision.promoted and bearer is not None and bearer.artifact.digest != beaten:
            alias = CHALLENGER
            _log.warning(
                "promote: version %s of %s became %s meanwhile; this model is registered as %s: "
                "run the recipe again to compare it with that one",
                *(bearer.version, decision.model_name, decision.alias, alias),
            )
        candidate = ModelCandidate(
            name=decision.model_name,
            alias=alias,
            artifact=model,
            directory=self._history.storage.local_copy(model),
            run_id=run_id,
            metrics=entry.metrics,
            beat=entry.inputs.get(INCUMBENT) if alias == decision.alias else None,
        )
        self._tracker.register(candidate)


def _points(records: list[JournalRecord]) -> list[MetricPoint]:
    return [
        MetricPoint(name, value, record.step or 0, record.time_ms)
        for record in records
        if record.kind == "metrics"
        for name, value in record.values.items()
    ]
