"""Sends the same data to several trackers, each with its own shipper and ledger.

A tracker that fails does not delay the others, and one that is added later receives every run that
is used again.
"""

import time
from collections.abc import Sequence

from infra.tracking.ledger import RunEntry
from infra.tracking.shipper import Shipper


class FanOut:
    """Sends to the first tracker, whose ledger answers `find`, and to its mirrors."""

    def __init__(self, first: Shipper, mirrors: Sequence[Shipper]) -> None:
        self._first, self._mirrors = first, tuple(mirrors)

    def begin(self) -> None:
        """Start all shippers."""
        for teller in (self._first, *self._mirrors):
            teller.begin()

    def find(self, key: str) -> RunEntry | None:
        """Return the entry of the first tracker."""
        return self._first.find(key)

    def is_settled(self, key: str) -> bool:
        """True if every tracker received everything about a run."""
        return all(teller.is_settled(key) for teller in (self._first, *self._mirrors))

    def put(self, entry: RunEntry) -> None:
        """Queue a run for every tracker; mirrors get it without the first tracker's run id."""
        self._first.put(entry)
        for mirror in self._mirrors:
            mirror.put(entry.model_copy(update={"run_id": "", "told": ""}))

    def journal_grew(self, key: str) -> None:
        """Queue a stage with new journal records for every tracker."""
        for teller in (self._first, *self._mirrors):
            teller.journal_grew(key)

    def finish(self) -> None:
        """Finish all shippers."""
        for teller in (self._first, *self._mirrors):
            teller.finish()

    def close(self, deadline_s: float, upload_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Close all shippers; their deadlines run at the same time."""
        self.finish()
        began_at = time.monotonic() - waited_s
        for teller in (self._first, *self._mirrors):
            teller.close(deadline_s, upload_s, time.monotonic() - began_at)
