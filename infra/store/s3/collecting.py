"""Mutual exclusion of garbage collectors in a bucket, and waiting for their end.

    collecting/<n>    made by a conditional put; beats during the collection, empty afterwards
    collecting/clock  written to read the service's time

A bucket has no rename to hide things in one step. Instead, a process that begins to need something
records this first (a used stage, a published manifest) and then looks here. Without a collector, a
later one sees the record; otherwise it waits for the end and looks again at what exists.

Promises: a collector without a beat stops removing long before others take it for dead, by the
service's clock, and long before waiting processes give up.
Does not promise: to cancel a removal request that the service itself delays for minutes.
"""

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from infra.errors import NotExclusiveError, StoreError
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.s3.objects import Found, Objects
from infra.waiting import wait_for

BEAT_EVERY_S = 5.0
MAX_SILENCE_S = 30.0
"""A collector without a beat for this long stops; a request in flight may take minutes."""
STALE_S = 300.0
"""A collector without a beat for this long counts as dead."""
MAX_HOLD_S = 1500.0
WAIT_DEADLINE_S = 3600.0
POLL_S = 1.0
_PLACE, _CLOCK = "collecting", "collecting/clock"
_log = logging.getLogger(__name__)


class Collecting:
    """The garbage collection in a store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._number: int | None = None
        self._began_at = 0.0

    def wait_until_over(self) -> bool:
        """Wait for the end of a collection; if True, what the caller saw before may be gone.

        Raises:
            DeadlineError: it took more than `WAIT_DEADLINE_S`.
        """
        at = self._under_way(self._found())
        if at is None:
            return False
        _log.warning("waiting while garbage is collected: %s", at)
        what = f"the collection of garbage at {at} to end"
        wait_for(lambda: self._under_way(self._found()) is None, what, WAIT_DEADLINE_S, POLL_S)
        return True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only collector; call `check` before each removal.

        Raises:
            StoreError: another collector is active, or the service failed.
        """
        found = self._found()
        at, number = self._under_way(found), max(found, default=-1) + 1
        if at is not None or not self._objects.create(_name(number), _content()):
            at = at or self._objects.place(_name(number))
            raise StoreError(f"{at}: another one collects garbage; run again when he is done")
        self._number, ended = number, threading.Event()
        self._began_at = self._found()[number].changed_at
        beating = threading.Thread(
            target=self._beat, args=[number, ended], name="collecting", daemon=True
        )
        beating.start()
        try:
            self._objects.delete([_name(each) for each in self._found() if each < number])
            yield
        finally:
            ended.set()
            beating.join(MAX_SILENCE_S)
            self._number = None
            self._objects.put(_name(number), b"")

    def check(self) -> None:
        """Raise `NotExclusiveError` if others may think that this one died, or wait too long."""
        if self._number is None:
            raise NotExclusiveError(f"{self._objects.place(_PLACE)}: no collector runs here")
        now, found = self._now(), self._found()
        own, where = found.get(self._number), self._objects.place(_name(self._number))
        if own is None or max(found) != self._number or now - own.changed_at > MAX_SILENCE_S:
            raise NotExclusiveError(
                f"{where}: no sign of life for a while, so that others may be at work there; "
                "nothing more is removed; run again"
            )
        if now - self._began_at > MAX_HOLD_S:
            raise NotExclusiveError(
                f"{where}: others wait since {MAX_HOLD_S:.0f} s; run again for what is left"
            )

    def _beat(self, number: int, ended: threading.Event) -> None:
        while not ended.wait(BEAT_EVERY_S):
            with suppress(StoreError):  # `check` sees the silence
                self._objects.put(_name(number), _content())

    def _under_way(self, found: Mapping[int, Found]) -> str | None:
        last = found[max(found)] if found else None
        beat = self._objects.get(last.name) if last and last.size_bytes else None
        if last is None or not beat or is_dead(beat.decode().split()[0]):
            return None
        return None if self._now() - last.changed_at > STALE_S else self._objects.place(last.name)

    def _now(self) -> float:
        """Return the service's time (seconds since the epoch), which also dates its objects."""
        self._objects.put(_CLOCK, b"")
        return max(each.changed_at for each in self._objects.listed(_CLOCK))

    def _found(self) -> dict[int, Found]:
        found = {each.name.rpartition("/")[2]: each for each in self._objects.listed(f"{_PLACE}/")}
        return {int(name): each for name, each in found.items() if name.isdigit()}


def _name(number: int) -> str:
    return f"{_PLACE}/{number}"


def _content() -> bytes:  # unique, so that `Objects.create` recognizes its own object
    return f"{own_stamp()} {uuid.uuid4().hex}".encode()
