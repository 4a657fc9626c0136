"""The contents of a store in a bucket, and how they are removed while others use the store.

    collecting/<n>    created by a conditional put; rewritten during the collection, then emptied
    collecting/clock  written to read the service's time

A bucket has no rename to hide things in one step. Instead, a process that begins to need something
records this first (a used stage, a published manifest) and then looks for a collector. A collector
that begins later sees the record; for one under way the process waits, and then looks again at what
exists.

Promises: as `infra.store.inventory`, during `exclusively`: the object that makes a thing visible
(newest log entry, manifest) goes first, so after a kill a stage is either done or not. A collector
stops removing long before others take it for dead (no beat, by the service's clock), and long
before waiting processes give up.
Does not promise: to count old versions that the bucket keeps; to cancel a removal request that
the service itself delays for minutes.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import PurePath

from infra.errors import NotExclusiveError, StoreError
from infra.faults import fault
from infra.store.artifacts import MANIFEST_NAME
from infra.store.inventory import Inventory, Stored, StoredStage
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.s3.objects import MAX_DELETED, Found, Objects, Unfinished
from infra.waiting import Repeated, wait_for

BEAT_EVERY_S = 5.0
MAX_SILENCE_S = 30.0
"""A collector without a beat for this long stops; a request in flight may take minutes."""
STALE_S = 300.0
"""A collector without a beat for this long counts as dead."""
MAX_HOLD_S = 1500.0
WAIT_DEADLINE_S = 3600.0
POLL_S = 1.0
ABANDONED_S = 24 * 3600.0
"""A probe or an upload that is older is not in use any more."""
_PLACE, _CLOCK = "collecting", "collecting/clock"
_log = logging.getLogger(__name__)


class Collecting:
    """Lets one process at a time collect garbage in a store; users wait until it is done."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._number: int | None = None
        self._began_at = 0.0

    def wait_until_over(self) -> bool:
        """Wait until no collection is under way; True if one was: what the caller saw may be gone.

        Raises:
            DeadlineError: the collection took more than `WAIT_DEADLINE_S`.
        """
        at = self._under_way(self._found())
        if at is None:
            return False
        _log.warning("waiting while garbage is collected: %s", at)
        wait_for(
            lambda: self._under_way(self._found()) is None,
            f"the collection of garbage at {at} to end",
            WAIT_DEADLINE_S,
            POLL_S,
        )
        return True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which this process is the only collector; call `check` before each removal.

        Raises:
            StoreError: another collector is active, or the service failed.
        """
        found = self._found()
        at, number = self._under_way(found), max(found, default=-1) + 1
        if at is not None or not self._objects.create(_name(number), _content()):
            at = at or self._objects.place(_name(number))
            raise StoreError(
                f"{at}: another garbage collection is under way; run again when it is done"
            )
        self._number = number
        self._began_at = self._found()[number].changed_at
        beats = Repeated(partial(self._beat, number), BEAT_EVERY_S, "collecting")
        try:
            self._objects.delete([_name(each) for each in self._found() if each < number])
            yield
        finally:
            beats.end(MAX_SILENCE_S)
            self._number = None
            self._objects.put(_name(number), b"")

    def check(self) -> None:
        """Raise `NotExclusiveError` if no collection is held here, or it is silent or too long."""
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
                f"{where}: this collection has blocked others for {MAX_HOLD_S:.0f} s; "
                "run again for what is left"
            )

    def _beat(self, number: int) -> None:
        with suppress(StoreError):  # `check` sees the silence
            self._objects.put(_name(number), _content())

    def _under_way(self, found: Mapping[int, Found]) -> str | None:
        last = found[max(found)] if found else None
        beat = self._objects.get(last.name) if last and last.size_bytes else None
        if not (last and beat) or is_dead(beat.decode().split()[0]):
            return None
        return None if self._now() - last.changed_at > STALE_S else self._objects.place(last.name)

    def _now(self) -> float:
        """Return the service's time (seconds since the epoch), which also dates its objects."""
        self._objects.put(_CLOCK, b"")
        return max(each.changed_at for each in self._objects.listed(_CLOCK))

    def _found(self) -> dict[int, Found]:
        found = {_number(each.name): each for each in self._objects.listed(f"{_PLACE}/")}
        return {number: each for number, each in found.items() if number >= 0}


def _name(number: int) -> str:
    return f"{_PLACE}/{number}"


def _content() -> bytes:  # unique, so that `Objects.create` recognizes its own object
    return f"{own_stamp()} {uuid.uuid4().hex}".encode()


class S3Inventory(Inventory):
    """`Inventory` of a store in a bucket."""

    others_wait = True

    def __init__(self, objects: Objects, collecting: Collecting) -> None:
        self._objects, self._collecting = objects, collecting
        self._unfinished: dict[str, Unfinished] = {}

    def exclusively(self) -> AbstractContextManager[None]:
        """See `Inventory.exclusively`; a record in the bucket excludes others."""
        return self._collecting.hold()

    def stages(self) -> dict[str, StoredStage]:
        """See `Inventory.stages`; two listings for any number of stages."""
        of_work = self._objects.listed("work/")
        logs, works = _by_place(self._objects.listed("stages/"), 2), _by_place(of_work, 2)
        steps: dict[str, list[Stored]] = {}
        for place, files in _by_place(of_work, 3).items():
            fingerprint, _, part = place.removeprefix("work/").partition("/")
            if part.startswith("steps-"):
                steps.setdefault(fingerprint, []).append(_stored(place, files))

        return {
            name: StoredStage(
                _stored(f"stages/{name}", logs.get(f"stages/{name}", ())),
                _stored(f"work/{name}", works.get(f"work/{name}", ())),
                tuple(steps.get(name, ())),
            )
            for name in sorted({place.split("/")[1] for place in (*logs, *works)})
        }

    def artifacts(self) -> dict[str, list[Stored]]:
        """See `Inventory.artifacts`; publishing again rewrites the manifest and so the age."""
        found: dict[str, list[Stored]] = {}
        for place, files in _by_place(self._objects.listed("artifacts/"), 3).items():
            found.setdefault(place.rpartition("/")[2], []).append(_stored(place, files))
        return found

    def leftovers(self) -> list[Stored]:
        """See `Inventory.leftovers`."""
        now = time.time()
        self._unfinished = {
            f"{each.name}?uploadId={each.upload}": each
            for each in self._objects.unfinished(before=now - ABANDONED_S)
        }
        probes = [e for e in self._objects.listed("probes/") if now - e.changed_at > ABANDONED_S]
        return [
            *(Stored(place, e.size_bytes, e.begun_at) for place, e in self._unfinished.items()),
            *(Stored(each.name, each.size_bytes, each.changed_at) for each in probes),
        ]

    def remove_unless(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """See `Inventory.remove_unless`."""
        self._collecting.check()
        if (unfinished := self._unfinished.get(place)) is not None:
            self._objects.abort(unfinished)
            return True
        found = self._files(place)
        if found and is_needed(_touched_at(found)):
            return False
        for group in self._in_order(place, [each.name for each in found]):
            for at in range(0, len(group), MAX_DELETED):
                self._collecting.check()
                self._objects.delete(group[at : at + MAX_DELETED])
                fault("garbage.taken")
        return True

    def _in_order(self, place: str, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield groups of names in the order of removal; what makes a thing visible goes first."""
        what, *parts = place.split("/")
        if what == "stages":
            yield from ([name] for name in sorted(names, key=_number, reverse=True))
            return
        manifests = [name for name in names if name.endswith(f"/{MANIFEST_NAME}")]
        rest = [name for name in names if name not in {*manifests}]
        if what == "work":
            followers = [PurePath(name).name for name in names if "/followers/" in name]
            rest = [*(f"followed/{name}/{parts[0]}" for name in followers), *rest]
            work = f"work/{parts[0]}/"
            steps = [f"{work}{n}/" for n in self._objects.children(work) if n.startswith("steps-")]
            if all(each.startswith(f"{place}/") for each in steps):
                rest = [f"with-steps/{parts[0]}", *rest]
        yield from (group for group in (manifests, rest) if group)

    def _files(self, place: str) -> list[Found]:
        return [
            each
            for each in self._objects.listed(place)
            if each.name == place or each.name.startswith(f"{place}/")
        ]


def _by_place(found: Iterable[Found], num_parts: int) -> dict[str, list[Found]]:
    of_place: dict[str, list[Found]] = {}
    for each in found:
        of_place.setdefault("/".join(each.name.split("/")[:num_parts]), []).append(each)
    return of_place


def _stored(place: str, found: Sequence[Found]) -> Stored:
    return Stored(place, sum(each.size_bytes for each in found), _touched_at(found))


def _number(entry: str) -> int:
    name = PurePath(entry).name
    return int(name) if name.isdigit() else -1


def _touched_at(found: Sequence[Found]) -> float:
    return max((each.changed_at for each in found), default=0.0)
