"""A store in a bucket: `artifacts/<kind>/<digest>/`, `stages/<fingerprint>/`, `work/`, `runs/`.

Promises: as `Storage`. An artifact exists when its manifest does, which is written last by a
conditional put; every byte is compared with the manifest on upload and download.
Does not promise: that `lookup` or a second `publish` notices bytes that the service changed without
changing the size; `local_copy` and `verify` do.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from infra import env
from infra.errors import ArtifactCorruptError, ArtifactNotFoundError
from infra.faults import fault
from infra.store.artifacts import MANIFEST_NAME, Level, Manifest, parse_manifest
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.runs import Runs
from infra.store.s3 import objects as objects_of
from infra.store.s3.cache import ArtifactCache, transfer
from infra.store.s3.channel import S3Channel
from infra.store.s3.inventory import Collecting, S3Inventory
from infra.store.s3.objects import Found, Objects, S3Address
from infra.store.stage_log import STALE_S, StageLogs
from infra.store.stage_spec import Artifact, check_fingerprint
from infra.store.storage import SECOND_REFUSED, Storage, artifact_name

_log = logging.getLogger(__name__)


class S3Storage(Storage):
    """A store in a bucket, `s3://bucket/prefix`; raises as `S3Address.parse`."""

    def __init__(self, uri: str) -> None:
        self._address = S3Address.parse(uri)
        self._objects = Objects(self._address)
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
        return self._address.uri

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
        return S3Channel.with_steps(self._objects)

    def _publish(self, source: Path, manifest: Manifest) -> None:
        """See `Storage`; the files stay in this machine's cache."""
        root = artifact_name(manifest.kind, manifest.digest)
        self._upload(source, root, manifest)
        while self._collecting.wait_until_over():
            self._upload(source, root, manifest)
        self._cache.take_in(source, manifest.kind, manifest.digest)
        shutil.rmtree(source, ignore_errors=True)

    def _upload(self, source: Path, root: str, manifest: Manifest) -> None:
        """Upload what is missing, and always the manifest: its age tells a collector of the use."""
        present = self._sizes(root)
        missing = {
            name: entry
            for name, entry in manifest.files.items()
            if present.get(name) != entry.size_bytes
        }
        transfer(
            partial(self._objects.upload, source / name, f"{root}/{name}", entry)
            for name, entry in missing.items()
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
        manifest = self._manifest(artifact)
        root = artifact_name(artifact.kind, artifact.digest)
        if level == "manifest":
            return manifest
        present = self._sizes(root)
        for name, entry in manifest.files.items():
            if present.get(name) != entry.size_bytes:
                raise ArtifactCorruptError(
                    f"{self._objects.place(f'{root}/{name}')} has {present.get(name, 'no')} bytes, "
                    f"the manifest says {entry.size_bytes}"
                )
        if level == "bytes":
            for name, entry in manifest.files.items():
                found, at = hashlib.sha256(), 0
                while at < entry.size_bytes:
                    end = min(at + objects_of.PART_BYTES, entry.size_bytes)
                    found.update(self._objects.part(f"{root}/{name}", at, end))
                    at = end
                if found.hexdigest() != entry.sha256:
                    raise ArtifactCorruptError(
                        f"{self._objects.place(f'{root}/{name}')}: sha256 {found.hexdigest()} != "
                        f"{entry.sha256} of the manifest"
                    )
        return manifest

    def _fetch(self, artifact: Artifact) -> Path:
        root = artifact_name(artifact.kind, artifact.digest)

        def manifest() -> Manifest:
            return self.verify(artifact, "size")

        def read(name: str, start: int, end: int) -> bytes:
            return self._objects.part(f"{root}/{name}", start, end)

        self._manifest(artifact)  # the cache may have copies of artifacts of other stores
        return self._cache.fetch(artifact.kind, artifact.digest, manifest, read)

    def _manifest(self, artifact: Artifact) -> Manifest:
        name = f"{artifact_name(artifact.kind, artifact.digest)}/{MANIFEST_NAME}"
        data, where = self._objects.get(name), self._objects.place(name)
        if data is None:
            raise ArtifactNotFoundError(f"{where} is not in the store")
        manifest = parse_manifest(data, where, artifact.kind)
        if manifest.digest != artifact.digest:
            raise ArtifactCorruptError(f"{where} is that of the artifact {manifest.digest}")
        return manifest

    def _sizes(self, root: str) -> dict[str, int]:
        cut = len(root) + 1
        return {each.name[cut:]: each.size_bytes for each in self._objects.listed(f"{root}/")}


class S3StageLogs(StageLogs):
    """`StageLogs` in a bucket; followers are also indexed by name, below `followed/`."""

    def __init__(self, objects: Objects, journal_bytes: Callable[[str, int], int]) -> None:
        super().__init__(objects, journal_bytes)
        self._objects = objects

    def join(self, fingerprint: str, follower: str) -> None:
        """See `StageLogs.join`; the index is written first, so it lists every visible follower."""
        self._objects.touch(_followed(fingerprint, follower))
        self._objects.put(_follower(fingerprint, follower), own_stamp().encode())

    def leave(self, fingerprint: str, follower: str) -> int:
        """See `StageLogs.leave`."""
        own = _follower(fingerprint, follower)
        found = self._objects.listed(own.rpartition("/")[0] + "/")
        self._objects.delete([own, _followed(fingerprint, follower)])
        now = max((each.changed_at for each in found), default=0.0)
        return sum(self._waits(each, now) for each in found if each.name != own)

    def followed_by(self, follower: str) -> list[str]:
        """See `StageLogs.followed_by`."""
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


def _follower(fingerprint: str, follower: str) -> str:
    return f"work/{check_fingerprint(fingerprint)}/followers/{check_fingerprint(follower)}"


def _followed(fingerprint: str, follower: str) -> str:
    return f"followed/{check_fingerprint(follower)}/{fingerprint}"
