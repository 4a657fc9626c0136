"""What lies in a store in a bucket, and how it is taken away.

Promises: as of `infra.store.inventory`, while `exclusively` lasts: what makes a thing visible goes
first (the newest entry of a log, a manifest), so that a kill leaves a stage that is done, or not.
Does not promise: sizes of old versions, where the bucket keeps them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from infra.faults import fault
from infra.store.artifacts import MANIFEST_NAME
from infra.store.inventory import Stored
from infra.store.s3.collecting import Collecting
from infra.store.s3.objects import MAX_DELETED, Found, Objects, Unfinished

ABANDONED_S = 24 * 3600.0
"""A probe or an upload that is older has nobody who waits for it."""


class S3Inventory:
    """`Inventory` of a store in a bucket.

    Args:
        objects: of the store.
        collecting: in the same store.
    """

    def __init__(self, objects: Objects, collecting: Collecting) -> None:
        self._objects, self._collecting = objects, collecting
        self._unfinished: dict[str, Unfinished] = {}
        self.exclusively: Callable[[], AbstractContextManager[None]] = collecting.hold

    def stages(self) -> list[str]:
        """See `Inventory.stages`."""
        return sorted({*self._objects.children("stages/"), *self._objects.children("work/")})

    def artifacts(self) -> dict[str, list[Stored]]:
        """See `Inventory.artifacts`. A publisher writes the manifest anew, so it is young again."""
        of_place: dict[str, list[Found]] = {}
        for each in self._objects.listed("artifacts/"):
            of_place.setdefault("/".join(each.name.split("/")[:3]), []).append(each)
        found: dict[str, list[Stored]] = {}
        for place, files in of_place.items():
            stored = Stored(place, _size_bytes(files), _touched_at(files))
            found.setdefault(place.rpartition("/")[2], []).append(stored)
        return found

    def log(self, fingerprint: str) -> Stored:
        """See `Inventory.log`."""
        return self._stored(f"stages/{fingerprint}")

    def work(self, fingerprint: str) -> Stored:
        """See `Inventory.work`."""
        return self._stored(f"work/{fingerprint}")

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

    def steps(self, fingerprint: str) -> list[Stored]:
        """See `Inventory.steps`."""
        names = self._objects.children(f"work/{fingerprint}/")
        return [
            self._stored(f"work/{fingerprint}/{name}")
            for name in names
            if name.startswith("steps-")
        ]

    def take(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """See `Inventory.take`."""
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
        """Names by the order in which they go: what makes others visible before these."""
        what, *parts = place.split("/")
        if what == "stages":
            yield from ([name] for name in sorted(names, key=_number, reverse=True))
            return
        manifests = [name for name in names if name.endswith(f"/{MANIFEST_NAME}")]
        rest = [name for name in names if name not in {*manifests}]
        if what == "work":
            rest = [*self._marks(place, parts[0], names), *rest]
        yield from (group for group in (manifests, rest) if group)

    def _marks(self, place: str, fingerprint: str, names: Sequence[str]) -> list[str]:
        """What leads to work that goes, from elsewhere in the store."""
        followed = [_followed(name) for name in names if "/followers/" in name]
        others = [e for e in self.steps(fingerprint) if not f"{e.place}/".startswith(f"{place}/")]
        return followed if others else [f"with-steps/{fingerprint}", *followed]

    def _stored(self, place: str) -> Stored:
        found = self._files(place)
        return Stored(place, _size_bytes(found), _touched_at(found))

    def _files(self, place: str) -> list[Found]:
        return [
            each
            for each in self._objects.listed(place)
            if each.name == place or each.name.startswith(f"{place}/")
        ]


def _number(entry: str) -> int:
    name = entry.rpartition("/")[2]
    return int(name) if name.isdigit() else -1


def _followed(follower: str) -> str:
    """The name by which a follower of `work/<fingerprint>/followers/<name>` finds it."""
    _, fingerprint, _, name = follower.split("/")
    return f"followed/{name}/{fingerprint}"


def _size_bytes(found: Sequence[Found]) -> int:
    return sum(each.size_bytes for each in found)


def _touched_at(found: Sequence[Found]) -> float:
    return max((each.changed_at for each in found), default=0.0)
