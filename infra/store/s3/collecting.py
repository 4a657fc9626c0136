"""Taking things away from a bucket: one collector at a time, and nobody relies on what is going.

    collecting/<n>    by a conditional put; beats while its maker collects, empty once he is done
    collecting/clock  written by whoever wants to know the service's time

A bucket renames nothing, so what goes cannot lose its name in one step. Instead whoever begins to
need something says so first, and then looks here: a run after it marked a stage as used, a
publisher after he wrote a manifest. If he finds no collector, a later one will see what he said;
else he waits for the end, and looks again what is there.

Promises: a collector that could not beat takes nothing more long before others take him for dead.
Does not promise: that a removal which the service itself holds back for minutes comes to nothing.
"""

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from infra.errors import StoreError
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.s3.objects import Found, Objects
from infra.waiting import wait_for

BEAT_EVERY_S = 5.0
MAX_SILENCE_S = 30.0
"""A collector that did not beat for so long stops; a request that he began may take minutes."""
STALE_S = 300.0
"""Without a beat for so long, by the service's clock, a collector is taken for dead."""
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
        self._beat_at = 0.0

    def wait_until_over(self) -> bool:
        """Wait for the end of a collection.

        Returns:
            Whether there was one; then what the caller said or saw before may be gone.

        Raises:
            DeadlineError: it took more than `WAIT_DEADLINE_S`.
            StoreError: the service refused or failed.
        """
        at = self._under_way()
        if at is None:
            return False
        _log.warning("waiting while garbage is collected: %s", at)
        what = f"the collection of garbage at {at} to end"
        wait_for(lambda: self._under_way() is None, what, WAIT_DEADLINE_S, POLL_S)
        return True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Collect; `check` is asked before anything is removed.

        Raises:
            StoreError: another collector is at work, or the service refused or failed.
        """
        at, number = self._under_way(), max(self._found(), default=-1) + 1
        if at is not None or not self._objects.create(_name(number), _content()):
            at = at or self._objects.place(_name(number))
            raise StoreError(f"{at}: another one collects garbage; run again when he is done")
        self._number, self._beat_at, ended = number, time.monotonic(), threading.Event()
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
            StoreError: others may believe by now that nobody collects.
        """
        number = self._number
        if number is None:
            raise StoreError(f"{self._objects.place(_PLACE)}: nobody collects here")
        silent_s = time.monotonic() - self._beat_at
        if silent_s > MAX_SILENCE_S or max(self._found(), default=-1) != number:
            raise StoreError(
                f"{self._objects.place(_name(number))}: no sign of life for {silent_s:.0f} s, so "
                "that another may collect; nothing more is removed; run again"
            )

    def _beat(self, number: int, ended: threading.Event) -> None:
        while not ended.wait(BEAT_EVERY_S):
            began_at = time.monotonic()
            try:
                self._objects.put(_name(number), _content())
            except StoreError:
                continue  # `check` sees the silence
            self._beat_at = began_at

    def _under_way(self) -> str | None:
        """Where the collector beats that is at work; None if nobody is."""
        found = self._found()
        last = found[max(found)] if found else None
        beat = self._objects.get(last.name) if last and last.size_bytes else None
        if last is None or not beat or is_dead(beat.decode().split()[0]):
            return None
        # Only the service knows how old its objects are.
        self._objects.put(_CLOCK, b"")
        at = {each.name: each.changed_at for each in self._objects.listed(f"{_PLACE}/")}
        if at[_CLOCK] - at.get(last.name, 0.0) > STALE_S:
            return None
        return self._objects.place(last.name)

    def _found(self) -> dict[int, Found]:
        """What collectors wrote, by their numbers."""
        found = {each.name.rpartition("/")[2]: each for each in self._objects.listed(f"{_PLACE}/")}
        return {int(name): each for name, each in found.items() if name.isdigit()}


def _name(number: int) -> str:
    return f"{_PLACE}/{number}"


def _content() -> bytes:
    """Unlike any before it."""
    return f"{own_stamp()} {uuid.uuid4().hex}".encode()
