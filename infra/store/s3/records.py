"""Small records of a store in a bucket: logs of stages, followers, and runs.

    stages/<fingerprint>/<n>                   entries of a log
    work/<fingerprint>/followers/<name>        a follower; written again while it waits
    followed/<name>/<fingerprint>              the same, indexed by follower
    runs/<key>/name, kept, stages/<fingerprint>, artifacts/<digest>

Promises: as the local forms (`infra.store.stage_log`, `followers`, `runs`). Only the service's
clock measures how long a follower was silent.
"""

from infra.errors import ArtifactCorruptError
from infra.store.heartbeat import STALE_S
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.runs import KnownRun
from infra.store.s3.inventory import Collecting
from infra.store.s3.objects import Found, Objects
from infra.store.stage_spec import check_fingerprint


class S3LogFiles:
    """`LogFiles` in a bucket; an entry is made by a conditional put."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def place(self, fingerprint: str) -> str:
        """See `LogFiles.place`."""
        return self._objects.place(_log(fingerprint))

    def numbers(self, fingerprint: str) -> list[int]:
        """See `LogFiles.numbers`."""
        return self._numbers(f"{_log(fingerprint)}/").get(fingerprint, [])

    def all_numbers(self) -> dict[str, list[int]]:
        """See `LogFiles.all_numbers`."""
        return self._numbers("stages/")

    def _numbers(self, prefix: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for each in self._objects.listed(prefix):
            log, _, name = each.name.rpartition("/")
            if name.isdigit():
                found.setdefault(log.rpartition("/")[2], []).append(int(name))
        return {fingerprint: sorted(numbers) for fingerprint, numbers in found.items()}

    def read(self, fingerprint: str, number: int) -> bytes:
        """See `LogFiles.read`."""
        data = self._objects.get(f"{_log(fingerprint)}/{number}")
        if data is None:
            raise ArtifactCorruptError(f"{self.place(fingerprint)} lost entry {number}; restore it")
        return data

    def create(self, fingerprint: str, number: int, data: bytes) -> bool:
        """See `LogFiles.create`."""
        return self._objects.create(f"{_log(fingerprint)}/{number}", data)


class S3Followers:
    """`Followers` in a bucket."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def join(self, fingerprint: str, follower: str) -> None:
        """See `Attempts.join`; the index is written first, so it lists every visible follower."""
        self._objects.put(_followed(fingerprint, follower), b"")
        self._objects.put(_follower(fingerprint, follower), own_stamp().encode())

    def leave(self, fingerprint: str, follower: str) -> int:
        """See `Attempts.leave`."""
        own = _follower(fingerprint, follower)
        found = self._objects.listed(own.rpartition("/")[0] + "/")
        self._objects.delete([own, _followed(fingerprint, follower)])
        now = max((each.changed_at for each in found), default=0.0)
        return sum(self._waits(each, now) for each in found if each.name != own)

    def followed_by(self, follower: str) -> list[str]:
        """See `Attempts.followed_by`."""
        found = self._objects.listed(_followed("", follower))
        return sorted(each.name.rpartition("/")[2] for each in found)

    def _waits(self, each: Found, now: float) -> bool:
        stamp = self._objects.get(each.name)
        if stamp is None:
            return False
        if now - each.changed_at > STALE_S or is_dead(stamp.decode()):
            _, fingerprint, _, follower = each.name.split("/")
            self._objects.delete([each.name, _followed(fingerprint, follower)])
            return False
        return True


class S3Runs:
    """`Runs` in a bucket."""

    def __init__(self, objects: Objects, collecting: Collecting) -> None:
        self._objects, self._collecting = objects, collecting
        self._names: dict[str, str] = {}

    def begin(self, key: str, name: str) -> None:
        """See `Runs.begin`."""
        self._objects.create(f"{_run(key)}/name", name.encode())
        while self._collecting.wait_until_over():
            self._objects.create(f"{_run(key)}/name", name.encode())

    def use(self, key: str, fingerprint: str) -> None:
        """See `Runs.use`; waits while garbage is collected, so the next lookup is reliable."""
        self._say(f"{_run(key)}/stages/{check_fingerprint(fingerprint)}")

    def read(self, key: str, digest: str) -> None:
        """See `Runs.read`; waits as `use`."""
        self._say(f"{_run(key)}/artifacts/{check_fingerprint(digest)}")

    def keep(self, key: str, kept: bool) -> None:
        """See `Runs.keep`."""
        if kept:
            self._say(f"{_run(key)}/kept")
        else:
            self._objects.delete([f"{_run(key)}/kept"])

    def known(self) -> list[KnownRun]:
        """See `Runs.known`."""
        at: dict[str, dict[str, dict[str, float]]] = {}
        kept: set[str] = set()
        for each in self._objects.listed("runs/"):
            _, key, what, *name = each.name.split("/")
            if what == "kept":
                kept.add(key)
            elif name:
                at.setdefault(key, {}).setdefault(what, {})[name[0]] = each.changed_at
        runs = [
            KnownRun(
                key, self._name(key), key in kept, of.get("stages", {}), of.get("artifacts", {})
            )
            for key, of in at.items()
        ]
        return sorted(runs, key=lambda run: (run.name, run.key))

    def forget(self, key: str) -> None:
        """See `Runs.forget`; called by the garbage collector."""
        self._collecting.check()
        self._objects.delete([each.name for each in self._objects.listed(f"{_run(key)}/")])

    def _say(self, name: str) -> None:
        """Put the object, and again after a collection, so that every later one sees it."""
        self._objects.put(name, b"")
        while self._collecting.wait_until_over():
            self._objects.put(name, b"")

    def _name(self, key: str) -> str:
        if key not in self._names:
            data = self._objects.get(f"{_run(key)}/name")
            if data is None:
                return key[:12]
            self._names[key] = data.decode()
        return self._names[key]


def _log(fingerprint: str) -> str:
    return f"stages/{check_fingerprint(fingerprint)}"


def _follower(fingerprint: str, follower: str) -> str:
    return f"work/{check_fingerprint(fingerprint)}/followers/{check_fingerprint(follower)}"


def _followed(fingerprint: str, follower: str) -> str:
    return f"followed/{check_fingerprint(follower)}/{fingerprint}"


def _run(key: str) -> str:
    return f"runs/{check_fingerprint(key)}"
