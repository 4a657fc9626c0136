"""Taking things away from a bucket: one collector at a time, and nobody relies on what is going.

    collecting/<n>    by a conditional put; beats while its maker collects, empty once he is done
    collecting/clock  written by whoever wants to know the service's time

A bucket renames nothing, so what goes cannot lose its name in one step. Instead whoever begins to
need something says so first, and then looks here: a run after it marked a stage as used, a
publisher after he wrote a manifest. If he finds no collector, a later one will see what he said;
else he waits for the end, and looks again what is there.

Promises: a collector that did not beat takes nothing more long before others take him for dead; how
long, the service's clock says, which goes on while a machine sleeps. He stops long before those
who wait give up.
Does not promise: that a removal which the service itself holds back for minutes comes to nothing.
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
"""A collector that did not beat for so long stops; a request that he began may take minutes."""
STALE_S = 300.0
"""Without a beat for so long a collector is taken for dead."""
MAX_HOLD_S = 1500.0
WAIT_DEADLINE_S = 3600.0
POLL_S = 1.0
_PLACE, _CLOCK = "collecting", "collecting/clock"
_log = logging.getLogger(__name__)


class Collecting:
    """Who collects in a store.

    Args:
        objects: of the store.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._number: int | None = None
        self._began_at = 0.0

    def wait_until_over(self) -> bool:
        """Wait for the end of a collection.

        Returns:
            Whether there was one; then what the caller said or saw before may be gone.

        Raises:
            DeadlineError: it took more than `WAIT_DEADLINE_S`.
            StoreError: the service refused or failed.
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
        """Collect; `check` is asked before anything is removed.

        Raises:
            StoreError: another collector is at work, or the service refused or failed.
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
        """Refuse to go on.

        Raises:
            NotExclusiveError: others may believe by now that nobody collects, or wait for long.
            StoreError: the service refused or failed.
        """
        if self._number is None:
            raise NotExclusiveError(f"{self._objects.place(_PLACE)}: nobody collects here")
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
        """Where the collector beats that is at work; None if nobody is."""
        last = found[max(found)] if found else None
        beat = self._objects.get(last.name) if last and last.size_bytes else None
        if last is None or not beat or is_dead(beat.decode().split()[0]):
            return None
        return None if self._now() - last.changed_at > STALE_S else self._objects.place(last.name)

    def _now(self) -> float:
        """The service's time, in seconds since the epoch: only it knows how old its objects are."""
        self._objects.put(_CLOCK, b"")
        return max(each.changed_at for each in self._objects.listed(_CLOCK))

    def _found(self) -> dict[int, Found]:
        """What collectors wrote, by their numbers."""
        found = {each.name.rpartition("/")[2]: each for each in self._objects.listed(f"{_PLACE}/")}
        return {int(name): each for name, each in found.items() if name.isdigit()}


def _name(number: int) -> str:
    return f"{_PLACE}/{number}"


def _content() -> bytes:
    """Unlike any before it."""
    return f"{own_stamp()} {uuid.uuid4().hex}".encode()
