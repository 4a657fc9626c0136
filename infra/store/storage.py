"""The store: published artifacts, the logs of stages, and the working files of attempts.

Promises: publishing equal content again only renews its age; `lookup` reads no artifact bytes;
`local_copy` returns verified bytes; damage raises an error, it never counts as "not done yet".
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.errors import ArtifactCorruptError, ArtifactNotFoundError, ConfigError
from infra.faults import fault
from infra.plugins import PluginTable, Row
from infra.store.artifacts import (
    EXTERNAL_KIND,
    MANIFEST_NAME,
    Level,
    Manifest,
    build_manifest,
    external_artifact,
    read_manifest,
    verify_directory,
    write_manifest,
)
from infra.store.atomic import (
    create_exclusively,
    fsync_directory,
    make_directories,
    publish_directory,
    remove_abandoned,
    temporary_sibling,
)
from infra.store.files import Files, LocalFiles
from infra.store.inventory import Inventory, LocalInventory
from infra.store.runs import Runs
from infra.store.stage_log import Attempt, LocalStageLogs, StageLogs, latest_commit
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.work_channel import LocalChannel, WorkChannel

_log = logging.getLogger(__name__)
_ARTIFACT = re.compile(r"artifacts/[a-z][a-z0-9_-]*/[0-9a-f]{64}")
NO_DIGESTS: Mapping[str, str] = {}
STORES = PluginTable(
    "store",
    "storage",
    [Row(name="s3", target="infra.store.s3.storage:S3Storage", requires="boto3", extra="s3")],
    Row,
)
"""Stores that are not local directories, by the scheme of their address."""
SECOND_REFUSED = "of two creates of one name the second is refused"


class Storage(ABC):
    """A store: in a directory, in a bucket, or that of a plugin.

    Attributes:
        attempts: logs of all stages, which say what attempt holds or committed each stage.
        runs: pipeline runs, and the stages that each of them uses.
        inventory: sizes and ages of everything in the store, for garbage collection.
    """

    attempts: StageLogs
    runs: Runs
    inventory: Inventory

    def __init__(self, files: Files) -> None:
        self._files = files
        self._copies: dict[tuple[str, str], Path] = {}

    @property
    @abstractmethod
    def uri(self) -> str:
        """Address for `open_storage` on any host that can reach the store."""

    @property
    def name(self) -> str:
        """Short random name of the store, created at the first access; paths are not unique."""
        while (found := self._files.get("name")) is None:
            self._files.create("name", uuid.uuid4().hex[:8].encode())
        return found.decode()

    @abstractmethod
    def probe(self) -> str:
        """Check that the store is writable and has exclusive creation; return a line of text.

        Raises:
            ConfigError: two creates of one name succeeded, so two attempts could own one stage.
        """

    @abstractmethod
    def channel(self, fingerprint: str) -> WorkChannel:
        """Return the channel between the jobs of a stage and the processes that watch them."""

    @abstractmethod
    def with_steps(self) -> list[str]:
        """Return the sorted fingerprints that have step checkpoints; reads directory names only."""

    def publish(self, source: Path, kind: str, digests: Mapping[str, str] = NO_DIGESTS) -> Artifact:
        """Move the files of a directory into the store as an artifact; `source` is gone afterwards.

        Equal content of one kind always gets the same digest and uri. `digests` has the sha256 of
        files that were hashed while they were written.

        Raises:
            ArtifactError: `source` has no file, or an entry that is not a regular file; or `kind`
                is no plain name.
        """
        fault("storage.before_publish")
        manifest = build_manifest(source, kind, digests)
        write_manifest(source, manifest)
        self._publish(source, manifest)
        return Artifact(kind=kind, uri=self._place(kind, manifest.digest), digest=manifest.digest)

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Record that a stage is done, as `StageLogs.commit`.

        Raises:
            ArtifactNotFoundError: the record's artifact is not in the store.
            FencedError: another attempt took over.
        """
        self.verify(record.artifact, "manifest")
        return self._located(self.attempts.commit(attempt, record))

    def lookup(self, fingerprint: str, force: str = "") -> CommitRecord | None:
        """Return the commit record of a stage; None if it is not finished. Reads no artifact bytes.

        A `force` token accepts only the generation that it requested.

        Raises:
            ArtifactCorruptError: the log, or the manifest of a finished stage, is damaged.
        """
        record = latest_commit(self.attempts.entries(fingerprint), force)
        if record is None:
            return None
        try:
            self.verify(record.artifact, "manifest")
        except (ArtifactNotFoundError, ArtifactCorruptError) as error:
            raise ArtifactCorruptError(
                f"stage {record.stage} {fingerprint} is committed, but its output is damaged: "
                f"{error}; restore it, or run with --force to compute it again"
            ) from error
        return self._located(record)

    @abstractmethod
    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """Compare an artifact with its manifest, which is returned.

        Raises:
            ArtifactNotFoundError: the store has no such artifact.
            ArtifactCorruptError: the content differs from the manifest.
        """

    def local_copy(self, artifact: Artifact) -> Path:
        """Return a local read-only path after verifying every byte once; raises as `verify`."""
        external = artifact.kind == EXTERNAL_KIND
        key = (artifact.uri if external else artifact.kind, artifact.digest)
        if key not in self._copies:
            if external:
                check_unchanged(artifact)
            self._copies[key] = Path(artifact.uri) if external else self._fetch(artifact)
        return self._copies[key]

    @abstractmethod
    def _publish(self, source: Path, manifest: Manifest) -> None:
        """Move a directory with its manifest into the store, or remove it if the store has it."""

    @abstractmethod
    def _fetch(self, artifact: Artifact) -> Path:
        """Return a local directory with the artifact's verified files."""

    def _journal_bytes(self, fingerprint: str, attempt: int) -> int:
        return self.channel(fingerprint).journal_bytes(attempt)

    def _place(self, kind: str, digest: str) -> str:
        return self._files.place(artifact_name(kind, digest))

    def _located(self, record: CommitRecord) -> CommitRecord:
        """Set the artifact's uri to its current place, since the store may have been moved."""
        place = self._place(record.artifact.kind, record.artifact.digest)
        changes = {"uri": place, "fingerprint": record.fingerprint}
        return record.model_copy(update={"artifact": record.artifact.model_copy(update=changes)})


class LocalStorage(Storage):
    """A store in a directory: `artifacts/<kind>/<digest>/`, `stages/<fingerprint>/`, `work/`."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        files = LocalFiles(self._root)
        super().__init__(files)
        self.attempts = LocalStageLogs(files, self._root, self._journal_bytes)
        self.runs = Runs(files)
        self.inventory = LocalInventory(self._root)

    @property
    def uri(self) -> str:
        """Absolute path of the store."""
        return str(self._root)

    def probe(self) -> str:
        """See `Storage.probe`."""
        make_directories(self._root)
        path = temporary_sibling(self._root / "probe")
        try:
            if not create_exclusively(path, b"") or create_exclusively(path, b""):
                raise ConfigError(
                    "storage",
                    f"{self._root} allows two exclusive creates of one file; "
                    "use another file system",
                )
        finally:
            path.unlink(missing_ok=True)
        return f"{self._root}: {SECOND_REFUSED}"

    def channel(self, fingerprint: str) -> LocalChannel:
        """See `Storage.channel`."""
        return LocalChannel(self._files, self._root, fingerprint)

    def with_steps(self) -> list[str]:
        """See `Storage.with_steps`."""
        steps = self._root.glob("work/*/steps-*/step-*")
        return sorted({path.parent.parent.name for path in steps})

    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """See `Storage.verify`."""
        directory = Path(self._place(artifact.kind, artifact.digest))
        if not directory.exists():
            raise ArtifactNotFoundError(f"{directory} is not in the store")
        return verify_named(directory, artifact.digest, level)

    def _fetch(self, artifact: Artifact) -> Path:
        self.verify(artifact, "bytes")
        return Path(self._place(artifact.kind, artifact.digest))

    def _publish(self, source: Path, manifest: Manifest) -> None:
        """See `Storage`; on the store's own file system this is one rename, no copy."""
        digest = manifest.digest
        final = Path(self._place(manifest.kind, digest))
        make_directories(final.parent)
        if self._holds(final, digest):
            # Its publisher may have died before the name was durable.
            fsync_directory(final.parent)
            shutil.rmtree(source)
            return
        try:
            publish_directory(source, final)
            return
        except FileExistsError:
            verify_named(final, digest)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_in(source, final, digest)
        shutil.rmtree(source)

    def _holds(self, final: Path, digest: str) -> bool:
        """Return True if the store has intact files of this digest; move a damaged copy aside."""
        # Another publisher may replace it, or the collector take it; equal digests are equal.
        with contextlib.suppress(FileNotFoundError):
            try:
                if os.path.lexists(final):
                    verify_named(final, digest)
                    os.utime(final)  # the garbage collector sees a recent use
                    return True
            except ArtifactCorruptError as error:
                aside = final.with_name(f".damaged-{temporary_sibling(final).name.lstrip('.')}")
                _log.warning("replacing a damaged artifact, kept as %s: %s", aside, error)
                final.rename(aside)
        return False

    def _copy_in(self, source: Path, final: Path, digest: str) -> None:
        remove_abandoned(final.parent)
        temporary = temporary_sibling(final)
        try:
            shutil.copytree(source, temporary, copy_function=_copy_file)
            verify_named(temporary, digest)
            publish_directory(temporary, final)
        except FileExistsError:
            verify_named(final, digest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def open_storage(uri: str) -> Storage:
    """Open the store at a path, `file:///path` or `s3://bucket/prefix`.

    Raises:
        ConfigError: the scheme is unknown, or its plugin cannot be loaded.
    """
    parts = urlsplit(uri)
    if uri and not parts.scheme:
        return LocalStorage(Path(uri))
    if parts.scheme == "file" and parts.netloc in {"", "localhost"} and parts.path:
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme in STORES.names():
        return STORES.load(parts.scheme)(uri)
    raise ConfigError(
        "storage", f"got {uri!r}; need a directory, file:///directory or s3://bucket/prefix"
    )


def artifact_name(kind: str, digest: str) -> str:
    """Return the name of an artifact's directory in a store; `ValueError` if it is not safe."""
    name = f"artifacts/{kind}/{digest}"
    if not _ARTIFACT.fullmatch(name):
        raise ValueError(f"artifact: got {name!r}; need {_ARTIFACT.pattern}")
    return name


def verify_named(directory: Path, digest: str, level: Level = "bytes") -> Manifest:
    """Verify an artifact directory `<kind>/<name>` and its digest; else `ArtifactCorruptError`."""
    try:
        manifest = read_manifest(directory, directory.parent.name)
    except ArtifactNotFoundError as error:
        raise ArtifactCorruptError(str(error)) from error
    except ArtifactCorruptError as error:
        raise ArtifactCorruptError(f"{error}; need that of digest {digest}") from error
    if manifest.digest != digest:
        found = f"{directory / MANIFEST_NAME}: digest {manifest.digest}"
        raise ArtifactCorruptError(f"{found}; need {digest}")
    return verify_directory(directory, level, manifest=manifest)


def check_unchanged(artifact: Artifact) -> None:
    """Raise `ArtifactCorruptError` if an external input has changed since it was planned."""
    found = external_artifact(Path(artifact.uri))
    if found.digest != artifact.digest:
        raise ArtifactCorruptError(
            f"{artifact.uri} changed after it was planned: "
            f"digest {found.digest} != {artifact.digest}; run again once no process writes to it"
        )


def _copy_file(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    os.chmod(target, 0o644)
    fault("storage.during_copy")
    return target
