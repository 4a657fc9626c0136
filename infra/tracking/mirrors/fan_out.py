"""Several trackers that are told the same, each by a shipper of its own.

Promises: what one of them does not take, or is away for, delays no other; each has a ledger of its
own, so one that is added later is told of every run that is used again.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from infra.tracking.ledger import RunEntry


class Teller(Protocol):
    """Whoever brings runs to trackers; `infra.tracking.shipper.Shipper` says how."""

    def begin(self) -> None:
        """Take up what earlier runs left untold."""
        ...

    def find(self, key: str) -> RunEntry | None:
        """A run as it was told last, or is to be told."""
        ...

    def is_settled(self, key: str) -> bool:
        """Whether everything about a run is known there."""
        ...

    def put(self, entry: RunEntry) -> None:
        """Tell a run."""
        ...

    def journal_grew(self, key: str) -> None:
        """A stage has new records."""
        ...

    def finish(self) -> None:
        """Tell the rest at once and then no more; nobody waits for it here."""
        ...

    def close(self, deadline_s: float, upload_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Tell the rest, but not for ever."""
        ...


class FanOut:
    """Tells the first tracker, whose ledger is asked, and its mirrors.

    Args:
        first: of the tracker.
        mirrors: of the others.
    """

    def __init__(self, first: Teller, mirrors: Sequence[Teller]) -> None:
        self._first, self._mirrors = first, tuple(mirrors)

    def begin(self) -> None:
        """Of each."""
        for teller in (self._first, *self._mirrors):
            teller.begin()

    def find(self, key: str) -> RunEntry | None:
        """As the first knows it."""
        return self._first.find(key)

    def is_settled(self, key: str) -> bool:
        """Whether all of them know everything."""
        return all(teller.is_settled(key) for teller in (self._first, *self._mirrors))

    def put(self, entry: RunEntry) -> None:
        """To each; what the first tracker calls the run is nothing to the others."""
        self._first.put(entry)
        for mirror in self._mirrors:
            mirror.put(entry.model_copy(update={"run_id": "", "told": ""}))

    def journal_grew(self, key: str) -> None:
        """To each."""
        for teller in (self._first, *self._mirrors):
            teller.journal_grew(key)

    def finish(self) -> None:
        """Each."""
        for teller in (self._first, *self._mirrors):
            teller.finish()

    def close(self, deadline_s: float, upload_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Of all of them together, at the same time."""
        self.finish()
        began_at = time.monotonic() - waited_s
        for teller in (self._first, *self._mirrors):
            teller.close(deadline_s, upload_s, time.monotonic() - began_at)
