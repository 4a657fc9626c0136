"""The contents of a store in a bucket, and how they are removed.

Promises: as `infra.store.inventory`, during `exclusively`: the object that makes a thing visible
(newest log entry, manifest) goes first, so after a kill a stage is either done or not.
Does not promise: the size of old versions that the bucket keeps.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from infra.faults import fault
from infra.store.artifacts import MANIFEST_NAME
from infra.store.inventory import Stored, StoredStage
from infra.store.s3.collecting import Collecting
from infra.store.s3.objects import MAX_DELETED, Found, Objects, Unfinished

ABANDONED_S = 24 * 3600.0
"""A probe or an upload that is older is not in use any more."""


class S3Inventory:
    """`Inventory` of a store in a bucket."""

    others_wait = True

    def __init__(self, objects: Objects, collecting: Collecting) -> None:
        self._objects, self._collecting = objects, collecting
        self._unfinished: dict[str, Unfinished] = {}
        self.exclusively: Callable[[], AbstractContextManager[None]] = collecting.hold

    def stages(self) -> dict[str, StoredStage]:
        """See `Inventory.stages`; two listings for any number of stages."""
        of_work = self._objects.listed("work/")
        logs, works = _by_place(self._objects.listed("stages/"), 2), _by_place(of_work, 2)
        steps: dict[str, list[Stored]] = {}
        for place, files in _by_place(of_work, 3).items():
            fingerprint, _, part = place.removeprefix("work/").partition("/")
            if part.startswith("steps-"):
                steps.setdefault(fingerprint, []).append(_stored(place, files))

        def stage(name: str) -> StoredStage:
            log, work = f"stages/{name}", f"work/{name}"
            return StoredStage(
                _stored(log, logs.get(log, ())),
                _stored(work, works.get(work, ())),
                tuple(steps.get(name, ())),
            )

        names = sorted({place.split("/")[1] for place in (*logs, *works)})
        return {name: stage(name) for name in names}

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
        """Group names in the order of removal: what makes others visible goes first."""
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
        followed = [_followed(name) for name in names if "/followers/" in name]
        work = f"work/{fingerprint}/"
        steps = [f"{work}{n}/" for n in self._objects.children(work) if n.startswith("steps-")]
        others = [each for each in steps if not each.startswith(f"{place}/")]
        return followed if others else [f"with-steps/{fingerprint}", *followed]

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
    name = entry.rpartition("/")[2]
    return int(name) if name.isdigit() else -1


def _followed(follower: str) -> str:
    _, fingerprint, _, name = follower.split("/")
    return f"followed/{name}/{fingerprint}"


def _touched_at(found: Sequence[Found]) -> float:
    return max((each.changed_at for each in found), default=0.0)
