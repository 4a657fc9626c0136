"""A store in a bucket: `artifacts/<kind>/<digest>/`, `stages/<fingerprint>/`, `work/`, `runs/`.

Promises: as `Storage`. An artifact exists when its manifest does, which is written last by a
conditional put; every byte is compared with the manifest on upload and download.
Does not promise: that `lookup` or a second `publish` notices bytes that the service changed without
changing the size; `local_copy` and `verify` do.
"""

import hashlib
import logging
import shutil
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from infra import env
from infra.errors import ArtifactCorruptError, ArtifactNotFoundError
from infra.faults import fault
from infra.store.artifacts import (
    EXTERNAL_KIND,
    MANIFEST_NAME,
    Level,
    Manifest,
    build_manifest,
    parse_manifest,
    write_manifest,
)
from infra.store.s3 import objects as objects_of
from infra.store.s3.cache import ArtifactCache, transfer
from infra.store.s3.channel import S3Channel
from infra.store.s3.inventory import Collecting, S3Inventory
from infra.store.s3.objects import Objects, S3Address
from infra.store.s3.records import S3Followers, S3LogFiles, S3Runs
from infra.store.stage_log import StageLogs
from infra.store.stage_spec import Artifact, check_fingerprint
from infra.store.storage import (
    KIND,
    NO_DIGESTS,
    SECOND_REFUSED,
    SHA256,
    StageResults,
    check_unchanged,
    require,
)

_log = logging.getLogger(__name__)


class S3Storage(StageResults):
    """A store in a bucket, `s3://bucket/prefix`; raises as `S3Address.parse`."""

    def __init__(self, uri: str) -> None:
        self._address = S3Address.parse(uri)
        self._objects = Objects(self._address)
        self._cache = ArtifactCache(env.home() / "cache")
        self._channels: dict[str, S3Channel] = {}
        self.attempts = StageLogs(
            S3LogFiles(self._objects), S3Followers(self._objects), self._journal_bytes
        )
        self._collecting = Collecting(self._objects)
        self.runs = S3Runs(self._objects, self._collecting)
        self.inventory = S3Inventory(self._objects, self._collecting)
        self._copies: dict[tuple[str, str], Path] = {}

    @property
    def uri(self) -> str:
        """Address of the store."""
        return self._address.uri

    @property
    def name(self) -> str:
        """See `Storage.name`; created once per store."""
        while (found := self._objects.get("name")) is None:
            self._objects.create("name", uuid.uuid4().hex[:8].encode())
        return found.decode()

    def probe(self) -> str:
        """See `Storage.probe`."""
        self._objects.require_conditions()
        return f"{self.uri} at {self._objects.endpoint}: {SECOND_REFUSED}"

    def channel(self, fingerprint: str) -> S3Channel:
        """See `Storage.channel`."""
        if fingerprint not in self._channels:
            check_fingerprint(fingerprint)
            self._channels[fingerprint] = S3Channel(self._objects, fingerprint)
        return self._channels[fingerprint]

    def with_steps(self) -> list[str]:
        """See `Storage.with_steps`."""
        return S3Channel.with_steps(self._objects)

    def publish(self, source: Path, kind: str, digests: Mapping[str, str] = NO_DIGESTS) -> Artifact:
        """See `Storage.publish`; the files stay in this machine's cache."""
        require(KIND, kind, "artifact kind")
        fault("storage.before_publish")
        manifest = build_manifest(source, kind, digests)
        digest, root = manifest.digest, _root(kind, manifest.digest)
        write_manifest(source, manifest)
        self._upload(source, root, manifest)
        while self._collecting.wait_until_over():
            self._upload(source, root, manifest)
        self._cache.take_in(source, kind, digest)
        shutil.rmtree(source, ignore_errors=True)
        return Artifact(kind=kind, uri=self._place(kind, digest), digest=digest)

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
        root = _root(artifact.kind, artifact.digest)
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

    def local_copy(self, artifact: Artifact) -> Path:
        """See `Storage.local_copy`."""
        external = artifact.kind == EXTERNAL_KIND
        key = (artifact.uri if external else artifact.kind, artifact.digest)
        if key not in self._copies:
            if external:
                check_unchanged(artifact)
                self._copies[key] = Path(artifact.uri)
            else:
                self._copies[key] = self._fetch(artifact)
        return self._copies[key]

    def _fetch(self, artifact: Artifact) -> Path:
        root = _root(artifact.kind, artifact.digest)

        def manifest() -> Manifest:
            return self.verify(artifact, "size")

        def read(name: str, start: int, end: int) -> bytes:
            return self._objects.part(f"{root}/{name}", start, end)

        self._manifest(artifact)  # the cache may have copies of artifacts of other stores
        return self._cache.fetch(artifact.kind, artifact.digest, manifest, read)

    def _manifest(self, artifact: Artifact) -> Manifest:
        name = f"{_root(artifact.kind, artifact.digest)}/{MANIFEST_NAME}"
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

    def _journal_bytes(self, fingerprint: str, attempt: int) -> int:
        return self.channel(fingerprint).journal_bytes(attempt)

    def _place(self, kind: str, digest: str) -> str:
        return self._objects.place(_root(kind, digest))


def _root(kind: str, digest: str) -> str:
    require(KIND, kind, "artifact kind")
    require(SHA256, digest, "artifact digest")
    return f"artifacts/{kind}/{digest}"
