"""Pipeline runs and what they use: one directory `runs/<key>/` per run.

    runs/<key>/name                    name for people
    runs/<key>/stages/<fingerprint>    touched whenever the run asks for the stage
    runs/<key>/artifacts/<digest>      artifact of this store that the run reads by its path
    runs/<key>/kept                    a user asked to keep what the run used

Promises: a run records a use before it looks the stage or artifact up. So either a collector that
hides something and then reads the records sees the use, or the run sees that the thing is gone.
Does not promise: that the record of a use survives a power loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.store.files import Files
from infra.store.stage_spec import check_fingerprint


@dataclass(frozen=True)
class KnownRun:
    """A pipeline run that used a store; times are in seconds since the epoch.

    Attributes:
        used_at: time of the last request for each stage, by fingerprint.
        read_at: time of the last read of each artifact that none of its stages made, by digest.
    """

    key: str
    name: str
    kept: bool
    used_at: Mapping[str, float]
    read_at: Mapping[str, float]

    @property
    def spoke_at(self) -> float:
        """Time of the last recorded use or read; seconds since the epoch."""
        return max((*self.used_at.values(), *self.read_at.values()), default=0.0)


class Runs:
    """Records the runs that use a store, and what each run uses.

    Args:
        wait_until_over: waits for the end of a garbage collection; returns True if one was under
            way, so that records made before may be gone.
        check_removal: raises if this process may not remove records now.
    """

    def __init__(
        self,
        files: Files,
        wait_until_over: Callable[[], bool] = lambda: False,
        check_removal: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self._wait_until_over, self._check_removal = wait_until_over, check_removal
        self._names: dict[str, str] = {}

    def begin(self, key: str, name: str) -> None:
        """Record a run; `key` is a sha256, `name` is for people."""
        place = f"{_run(key)}/name"
        # A resumed run needs no room on a full disk.
        if self._files.get(place) is None:
            self._files.create(place, name.encode())
        while self._wait_until_over():
            self._files.create(place, name.encode())

    def use(self, key: str, fingerprint: str) -> None:
        """Record that a run uses a stage; called before the stage is looked up."""
        self._record(self._files.touch, f"{_run(key)}/stages/{check_fingerprint(fingerprint)}")

    def read(self, key: str, digest: str) -> None:
        """Record that a run reads an artifact of the store that none of its stages made."""
        self._record(self._files.touch, f"{_run(key)}/artifacts/{check_fingerprint(digest)}")

    def keep(self, key: str, kept: bool) -> None:
        """Set or clear the mark that keeps everything a run used and read, however old."""
        if kept:
            self._record(self._files.touch, f"{_run(key)}/kept")
        else:
            self._files.delete([f"{_run(key)}/kept"])

    def known(self) -> list[KnownRun]:
        """Return the runs that used or read something, sorted by name and key."""
        at: dict[str, dict[str, dict[str, float]]] = {}
        kept: set[str] = set()
        for each in self._files.listed("runs/"):
            _, key, *name = each.name.split("/")
            if name == ["kept"]:
                kept.add(key)
            elif len(name) > 1:
                at.setdefault(key, {}).setdefault(name[0], {})[name[1]] = each.changed_at
        runs = [
            KnownRun(
                key, self._name(key), key in kept, of.get("stages", {}), of.get("artifacts", {})
            )
            for key, of in at.items()
        ]
        return sorted(runs, key=lambda run: (run.name, run.key))

    def forget(self, key: str) -> None:
        """Remove the record of a run, which may be absent; called by the garbage collector."""
        self._check_removal()
        self._files.remove(_run(key))

    def _record(self, write: Callable[..., object], *arguments: object) -> None:
        """Write a record, again after a collection under way, so that later collections see it."""
        write(*arguments)
        while self._wait_until_over():
            write(*arguments)

    def _name(self, key: str) -> str:
        if key not in self._names and (data := self._files.get(f"{_run(key)}/name")) is not None:
            self._names[key] = data.decode()
        return self._names.get(key, key[:12])  # while a run is being forgotten, its name is absent


def _run(key: str) -> str:
    return f"runs/{check_fingerprint(key)}"
