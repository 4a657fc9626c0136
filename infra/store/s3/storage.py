"""A store in a bucket, and the attempts' directories on this machine.

    artifacts/<kind>/<digest>/, stages/<fingerprint>/<n>, runs/<key>/   as in a local store
    work/<fingerprint>/attempt-<n>/spec.json, error.json                objects
                                   heartbeat, stacks.txt, journal/      see `infra.store.s3.mirror`
                       steps-<g>/                                       see `infra.store.s3.mirror`
                       followers/<name>               a follower; written again while it waits
    followed/<name>/<fingerprint>                     the same, indexed by follower
    with-steps/<fingerprint>                          stages that may have steps

Promises: as `Storage`. An artifact exists when its manifest does, which is written last by a
conditional put; every byte is compared with the manifest on upload and download. A reader of a
channel sees writes of its own process at once, those of others after `mirror.SHIP_EVERY_S`, and a
checkpoint after its upload. A local directory belongs to one log in the bucket and is removed
before the stage is computed again after garbage collection. Only the service's clock measures how
long a follower was silent.
Does not promise: that `lookup` or a second `publish` notices bytes that the service changed without
changing the size (`local_copy` and `verify` do); to merge checkpoint parts of several machines: the
machine that shares a checkpoint needs all its files.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath

from infra import env
from infra.errors import ArtifactCorruptError
from infra.faults import fault
from infra.host.records import file_lock
from infra.store.artifacts import MANIFEST_NAME, Level, Manifest
from infra.store.atomic import atomic_write_bytes, make_directories, remove_directory
from infra.store.canonical import sha256_json
from infra.store.process_stamp import own_stamp
from infra.store.runs import Runs
from infra.store.s3 import mirror
from infra.store.s3 import objects as objects_of
from infra.store.s3.cache import ArtifactCache, transfer
from infra.store.s3.inventory import Collecting, S3Inventory
from infra.store.s3.mirror import JournalChunks, SharedSteps
from infra.store.s3.objects import Objects, S3Address
from infra.store.stage_log import StageLogs, follower_name
from infra.store.stage_spec import Adoption, Artifact, check_fingerprint
from infra.store.storage import SECOND_REFUSED, Storage, artifact_name
from infra.store.work_channel import WorkChannel
from infra.waiting import Repeated

_DIGITS = 12
_WITH_STEPS = "with-steps/"
_LOG_MARK = "log"
LOCK_DEADLINE_S = 60.0
_log = logging.getLogger(__name__)


class S3Channel(WorkChannel):
    """`WorkChannel` of one fingerprint in a bucket.

    Reads of an attempt's records first upload what this process wrote.
    """

    def __init__(self, objects: Objects, fingerprint: str) -> None:
        super().__init__(objects, fingerprint, _local(objects) / fingerprint)
        self._objects = objects
        self._root = f"work/{fingerprint}"
        self._is_of_this_log = False
        self._shipments: list[Repeated] = []
        self._journals: dict[int, JournalChunks] = {}

    def read_journal(self, attempt: int, start: int = 0, end: int | None = None) -> bytes:
        """See `WorkChannel.read_journal`."""
        return self._journal(attempt).read(start, end)

    def journal_bytes(self, attempt: int) -> int:
        """See `WorkChannel.journal_bytes`; only shipped lines count."""
        chunks = self._journal(attempt)
        chunks.refresh()
        return chunks.num_bytes

    def local_dir(self, attempt: int) -> Path:
        """See `WorkChannel.local_dir`."""
        self._remove_other_log()
        path = super().local_dir(attempt)
        mirror.mirror(self._objects, f"{self._root}/attempt-{attempt}", path)
        return path

    def steps_dir(self, generation: int, adopted: Adoption | None = None) -> Path:
        """See `WorkChannel.steps_dir`."""
        self._remove_other_log()
        return super().steps_dir(generation, adopted)

    def share_steps(
        self, attempt: int, steps: Path, last: int, before_publish: Callable[[], None]
    ) -> None:
        """See `WorkChannel.share_steps`; a thread ships checkpoints while the job goes on."""
        super().share_steps(attempt, steps, last, before_publish)
        self.fetch_steps(steps, last)
        self._mark_steps()

        def before_manifest() -> None:
            self._ship(attempt)
            before_publish()

        self._shipments.append(mirror.share(self._shared(steps), before_manifest))

    def fetch_steps(self, steps: Path, last: int) -> None:
        """See `WorkChannel.fetch_steps`."""
        self._shared(steps).fetch(last)

    def ship_steps(self, steps: Path) -> None:
        """See `WorkChannel.ship_steps`."""
        self._mark_steps()
        self._shared(steps).ship()

    def step_numbers(self, steps: Path) -> list[int]:
        """See `WorkChannel.step_numbers`."""
        return self._shared(steps).numbers()

    def prune(self, attempts: Sequence[int], steps: Path) -> None:
        """See `WorkChannel.prune`; logs stay on the machine that wrote them."""
        for shipments in self._shipments:
            shipments.end(mirror.END_DEADLINE_S)
        remove_directory(steps)
        self._shared(steps).remove()
        if not self._objects.children(f"{self._root}/steps-"):
            self._objects.delete([f"{_WITH_STEPS}{self._fingerprint}"])
        for attempt in attempts:
            self._ship(attempt)
            mirror.end(self._local_path(attempt))
            super().prune([attempt], steps)

    def _remove_other_log(self) -> None:
        """Remove this machine's directory if it belongs to a log that the bucket no longer has."""
        first = None if self._is_of_this_log else self._objects.get(f"stages/{self._fingerprint}/0")
        if first is None:
            return
        mark, log = self._directory / _LOG_MARK, hashlib.sha256(first).hexdigest()
        with file_lock(self._directory.parent / ".lock", LOCK_DEADLINE_S):
            if mark.exists() and mark.read_text("ascii") != log:
                mirror.end_below(self._directory)
                remove_directory(self._directory)
            make_directories(self._directory)
            atomic_write_bytes(mark, log.encode("ascii"))
        self._is_of_this_log = True

    def _shared(self, steps: Path) -> SharedSteps:
        return SharedSteps(self._objects, f"{self._root}/{steps.name}", steps)

    def _mark_steps(self) -> None:
        self._objects.touch(f"{_WITH_STEPS}{self._fingerprint}")

    def _journal(self, attempt: int) -> JournalChunks:
        self._ship(attempt)
        chunks = JournalChunks(self._objects, f"{self._root}/attempt-{attempt}")
        return self._journals.setdefault(attempt, chunks)

    def _ship(self, attempt: int) -> None:
        mirror.ship(self._local_path(attempt))


def _local(objects: Objects) -> Path:
    return env.home() / "remote" / sha256_json(objects.address.uri)[:_DIGITS] / "work"


class S3StageLogs(StageLogs):
    """`StageLogs` in a bucket; followers are also indexed by name, below `followed/`."""

    def join(self, fingerprint: str, follower: str) -> None:
        """See `StageLogs.join`; the index is written first, so it lists every visible follower."""
        self._files.touch(_followed(fingerprint, follower))
        self._files.put(follower_name(fingerprint, follower), own_stamp().encode())

    def followed_by(self, follower: str) -> list[str]:
        """See `StageLogs.followed_by`."""
        found = self._files.listed(_followed("", follower))
        return sorted(PurePath(each.name).name for each in found)

    def _forget(self, fingerprint: str, follower: str) -> None:
        self._files.delete([follower_name(fingerprint, follower), _followed(fingerprint, follower)])

    def _stamp(self, record: bytes) -> str:
        return record.decode()


class S3Storage(Storage):
    """A store in a bucket, `s3://bucket/prefix`; raises as `S3Address.parse`."""

    def __init__(self, uri: str) -> None:
        self._objects = Objects(S3Address.parse(uri))
        super().__init__(self._objects)
        self._cache = ArtifactCache(env.home() / "cache")
        self._channels: dict[str, S3Channel] = {}
        self._collecting = Collecting(self._objects)
        self.attempts = S3StageLogs(self._objects, self._journal_bytes)
        self.runs = Runs(self._objects, self._collecting.wait_until_over, self._collecting.check)
        self.inventory = S3Inventory(self._objects, self._collecting)

    @property
    def uri(self) -> str:
        """Address of the store."""
        return self._objects.address.uri

    def probe(self) -> str:
        """See `Storage.probe`."""
        self._objects.require_conditions()
        return f"{self.uri} at {self._objects.endpoint}: {SECOND_REFUSED}"

    def channel(self, fingerprint: str) -> S3Channel:
        """See `Storage.channel`."""
        if fingerprint not in self._channels:
            self._channels[fingerprint] = S3Channel(self._objects, fingerprint)
        return self._channels[fingerprint]

    def with_steps(self) -> list[str]:
        """See `Storage.with_steps`."""
        here = _local(self._objects).glob("*/steps-*/step-*")
        there = self._objects.listed(_WITH_STEPS)
        names = {path.parent.parent.name for path in here}
        return sorted(names | {PurePath(each.name).name for each in there})

    def _publish(self, source: Path, manifest: Manifest) -> None:
        """See `Storage`; the files stay in this machine's cache."""
        root = artifact_name(manifest.kind, manifest.digest)
        self._upload(source, root, manifest)
        while self._collecting.wait_until_over():
            self._upload(source, root, manifest)
        self._cache.take_in(source, manifest.kind, manifest.digest)
        shutil.rmtree(source, ignore_errors=True)

    def _upload(self, source: Path, root: str, manifest: Manifest) -> None:
        """Upload missing files, and always the manifest: its age is the last use to a collector."""
        present = self._sizes(root)
        transfer(
            partial(self._objects.upload, source / name, f"{root}/{name}", entry)
            for name, entry in manifest.files.items()
            if present.get(name) != entry.size_bytes
        )
        data, name = manifest.to_bytes(), f"{root}/{MANIFEST_NAME}"
        standing = self._objects.get(name) if MANIFEST_NAME in present else None
        if standing is None:
            fault("storage.before_manifest")
            if self._objects.create(name, data):
                return
            standing = self._objects.get(name)
        if standing != data:
            _log.warning("replacing a damaged %s", self._objects.place(name))
        self._objects.put(name, data)

    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """See `Storage.verify`."""
        root = artifact_name(artifact.kind, artifact.digest)
        manifest = self._objects.manifest(root, artifact.kind, artifact.digest)
        if level == "manifest":
            return manifest
        present = self._sizes(root)
        for name, entry in manifest.files.items():
            if present.get(name) != entry.size_bytes:
                raise ArtifactCorruptError(
                    f"{self._objects.place(f'{root}/{name}')} has {present.get(name, 'no')} bytes, "
                    f"the manifest says {entry.size_bytes}"
                )
        for name, entry in manifest.files.items() if level == "bytes" else ():
            found = hashlib.sha256()
            for at in range(0, entry.size_bytes, objects_of.PART_BYTES):
                end = min(at + objects_of.PART_BYTES, entry.size_bytes)
                found.update(self._objects.part(f"{root}/{name}", at, end))
            objects_of.compare(self._objects.place(f"{root}/{name}"), found.hexdigest(), entry)
        return manifest

    def _fetch(self, artifact: Artifact) -> Path:
        root = artifact_name(artifact.kind, artifact.digest)
        # The cache may have copies of artifacts of other stores.
        self.verify(artifact, "manifest")
        return self._cache.fetch(
            artifact.kind,
            artifact.digest,
            lambda: self.verify(artifact, "size"),
            lambda name, *at: self._objects.part(f"{root}/{name}", *at),
        )

    def _sizes(self, root: str) -> dict[str, int]:
        found = self._objects.listed(f"{root}/")
        return {each.name.removeprefix(f"{root}/"): each.size_bytes for each in found}


def _followed(fingerprint: str, follower: str) -> str:
    return f"followed/{check_fingerprint(follower)}/{fingerprint}"
