"""The store: published artifacts, the logs of stages, and the working files of attempts.

Promises: publishing equal content again changes nothing; `lookup` reads no artifact bytes;
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
from typing import Protocol
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
from infra.store.heartbeat import LocalFollowers
from infra.store.inventory import Inventory, LocalInventory
from infra.store.runs import LocalRuns, Runs
from infra.store.stage_log import Attempt, Attempts, LocalLogFiles, StageLogs, latest_commit
from infra.store.stage_spec import Artifact, CommitRecord, check_fingerprint
from infra.store.work_channel import FileChannel, WorkChannel

_log = logging.getLogger(__name__)
SHA256 = re.compile(r"[0-9a-f]{64}")
KIND = re.compile(r"[a-z][a-z0-9_-]*")
NO_DIGESTS: Mapping[str, str] = {}
STORES = PluginTable(
    "store",
    "storage",
    [Row(name="s3", target="infra.store.s3.storage:S3Storage", requires="boto3", extra="s3")],
    Row,
)
"""Stores that are not local directories, by the scheme of their address."""
SECOND_REFUSED = "of two who create one name the second is refused"


class Storage(Protocol):
    """A store, local or remote."""

    @property
    def uri(self) -> str:
        """Address for `open_storage` on any host that can reach the store."""
        ...

    @property
    def name(self) -> str:
        """Short name, unique among all stores, that is valid in any system."""
        ...

    @property
    def attempts(self) -> Attempts:
        """The logs of all stages: which attempt holds or committed each stage."""
        ...

    @property
    def runs(self) -> Runs:
        """The pipeline runs, and the stages that each of them uses."""
        ...

    @property
    def inventory(self) -> Inventory:
        """Sizes and ages of everything in the store, for garbage collection."""
        ...

    def probe(self) -> str:
        """Check that the store is writable and has exclusive creation; return a line of text.

        Raises:
            ConfigError: two creates of one name succeeded, so two attempts could own one stage.
        """
        ...

    def channel(self, fingerprint: str) -> WorkChannel:
        """Return the channel between the jobs of a stage and the processes that watch them."""
        ...

    def with_steps(self) -> list[str]:
        """Return the sorted fingerprints that have step checkpoints; reads directory names only."""
        ...

    def publish(self, source: Path, kind: str, digests: Mapping[str, str] = NO_DIGESTS) -> Artifact:
        """Move the files of a directory into the store as an artifact; the caller gives it up.

        Equal content of one kind always gets the same digest and uri. `digests` has the sha256 of
        files that were hashed while they were written.

        Raises:
            ArtifactError: `source` has no file, or an entry that is not a regular file.
        """
        ...

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Record that a stage is done, as `Attempts.commit`.

        Raises:
            ArtifactNotFoundError: the record's artifact is not in the store.
            FencedError: another attempt took over.
        """
        ...

    def lookup(self, fingerprint: str, force: str = "") -> CommitRecord | None:
        """Return the commit record of a stage; None if it is not finished. Reads no artifact bytes.

        A `force` token accepts only the generation that it requested.

        Raises:
            ArtifactCorruptError: the stage is finished, but its log or manifest is damaged.
        """
        ...

    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """Compare an artifact with its manifest, which is returned.

        Raises:
            ArtifactNotFoundError: the store has no such artifact.
            ArtifactCorruptError: the content differs from the manifest.
        """
        ...

    def local_copy(self, artifact: Artifact) -> Path:
        """Return a local read-only path after verifying every byte once; raises as `verify`."""
        ...


def open_storage(uri: str) -> Storage:
    """Open the store at a path, `file:///path` or `s3://bucket/prefix`.

    Raises:
        ConfigError: the scheme is unknown.
    """
    parts = urlsplit(uri)
    if not parts.scheme:
        if not uri:
            raise ConfigError("storage", "got ''; need a directory or file:///directory")
        return LocalStorage(Path(uri))
    if parts.scheme == "file" and parts.netloc in {"", "localhost"} and parts.path:
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme in STORES.names():
        return STORES.load(parts.scheme)(uri)
    forms = "a directory, file:///directory or s3://bucket/prefix"
    raise ConfigError("storage", f"got {uri!r}; need {forms}")


class StageResults(ABC):
    """Queries about finished stages that every store answers from its logs."""

    attempts: Attempts

    @abstractmethod
    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """See `Storage.verify`."""

    @abstractmethod
    def _place(self, kind: str, digest: str) -> str:
        """Return the uri that an artifact has, or would have, in this store."""

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """See `Storage.commit`."""
        self.verify(record.artifact, "manifest")
        return self._located(self.attempts.commit(attempt, record))

    def lookup(self, fingerprint: str, force: str = "") -> CommitRecord | None:
        """See `Storage.lookup`."""
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

    def _located(self, record: CommitRecord) -> CommitRecord:
        """Set the artifact's uri to its current place, since the store may have been moved."""
        place = self._place(record.artifact.kind, record.artifact.digest)
        artifact = record.artifact.model_copy(
            update={"uri": place, "fingerprint": record.fingerprint}
        )
        return record.model_copy(update={"artifact": artifact})


class LocalStorage(StageResults):
    """A store in a directory: `artifacts/<kind>/<digest>/`, `stages/<fingerprint>/`, `work/`."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        followers = LocalFollowers(self._root / "work")
        self.attempts = StageLogs(LocalLogFiles(self._root), followers, self._journal_bytes)
        self.runs = LocalRuns(self._root)
        self.inventory = LocalInventory(self._root)
        self._verified: set[tuple[str, str]] = set()

    @property
    def uri(self) -> str:
        """Absolute path of the store."""
        return str(self._root)

    @property
    def name(self) -> str:
        """See `Storage.name`; random, since stores on two machines may have the same path."""
        path = self._root / "name"
        try:
            return path.read_text(encoding="ascii")
        except FileNotFoundError:
            make_directories(self._root)
            create_exclusively(path, uuid.uuid4().hex[:8].encode())
            return path.read_text(encoding="ascii")

    def probe(self) -> str:
        """See `Storage.probe`."""
        make_directories(self._root)
        path = temporary_sibling(self._root / "probe")
        try:
            if not create_exclusively(path, b"") or create_exclusively(path, b""):
                raise ConfigError("storage", f"{self._root} lets two create one file; name another")
        finally:
            path.unlink(missing_ok=True)
        return f"{self._root}: {SECOND_REFUSED}"

    def channel(self, fingerprint: str) -> FileChannel:
        """See `Storage.channel`."""
        return FileChannel(self._root / "work" / check_fingerprint(fingerprint))

    def with_steps(self) -> list[str]:
        """See `Storage.with_steps`."""
        found = (self._root / "work").glob("*/steps-*/step-*")
        return sorted({path.parent.parent.name for path in found})

    def publish(self, source: Path, kind: str, digests: Mapping[str, str] = NO_DIGESTS) -> Artifact:
        """See `Storage.publish`; on the store's own file system this is one rename, no copy."""
        require(KIND, kind, "artifact kind")
        fault("storage.before_publish")
        manifest = build_manifest(source, kind, digests)
        write_manifest(source, manifest)
        final = self._artifact_dir(kind, manifest.digest)
        make_directories(final.parent)
        if self._holds(final, manifest.digest):
            # Its publisher may have died before the name was durable.
            fsync_directory(final.parent)
            shutil.rmtree(source)
        else:
            self._take_in(source, final, manifest.digest)
        return Artifact(kind=kind, uri=str(final), digest=manifest.digest)

    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """See `Storage.verify`."""
        directory = self._artifact_dir(artifact.kind, artifact.digest)
        if not directory.exists():
            raise ArtifactNotFoundError(f"{directory} is not in the store")
        return verify_named(directory, artifact.digest, level)

    def local_copy(self, artifact: Artifact) -> Path:
        """See `Storage.local_copy`."""
        external = artifact.kind == EXTERNAL_KIND
        key = (artifact.uri if external else artifact.kind, artifact.digest)
        if key not in self._verified:
            if external:
                check_unchanged(artifact)
            else:
                self.verify(artifact, "bytes")
            self._verified.add(key)
        if external:
            return Path(artifact.uri)
        return self._artifact_dir(artifact.kind, artifact.digest)

    def _journal_bytes(self, fingerprint: str, attempt: int) -> int:
        return self.channel(fingerprint).journal_bytes(attempt)

    def _place(self, kind: str, digest: str) -> str:
        return str(self._artifact_dir(kind, digest))

    def _artifact_dir(self, kind: str, digest: str) -> Path:
        require(KIND, kind, "artifact kind")
        require(SHA256, digest, "artifact digest")
        return self._root / "artifacts" / kind / digest

    def _holds(self, final: Path, digest: str) -> bool:
        """Return True if the store has intact files of this digest; move a damaged copy aside."""
        try:
            final.lstat()
        except FileNotFoundError:
            return False
        try:
            verify_named(final, digest)
        except ArtifactCorruptError as error:
            aside = final.with_name(f".damaged-{temporary_sibling(final).name.lstrip('.')}")
            _log.warning("replacing a damaged artifact, kept as %s: %s", aside, error)
            # Another publisher may have replaced it already; equal digests are interchangeable.
            with contextlib.suppress(FileNotFoundError):
                final.rename(aside)
            return False
        try:
            os.utime(final)  # the garbage collector sees a recent use
        except FileNotFoundError:
            return False
        return True

    def _take_in(self, source_dir: Path, final: Path, digest: str) -> None:
        try:
            publish_directory(source_dir, final)
        except FileExistsError:
            verify_named(final, digest)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_in(source_dir, final, digest)
        else:
            return
        shutil.rmtree(source_dir)

    def _copy_in(self, source_dir: Path, final: Path, digest: str) -> None:
        remove_abandoned(final.parent)
        temporary = temporary_sibling(final)
        try:
            shutil.copytree(source_dir, temporary, copy_function=_copy_file)
            verify_named(temporary, digest)
            publish_directory(temporary, final)
        except FileExistsError:
            verify_named(final, digest)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def require(pattern: re.Pattern[str], value: str, what: str) -> None:
    """Raise `ValueError` unless a value that becomes a path component matches the pattern."""
    if not pattern.fullmatch(value):
        raise ValueError(f"{what}: got {value!r}; need {pattern.pattern}")


def verify_named(directory: Path, digest: str, level: Level = "bytes") -> Manifest:
    """Verify the artifact directory `<kind>/<name>` and that its manifest has the given digest."""
    try:
        found = read_manifest(directory, directory.parent.name).digest
    except ArtifactNotFoundError as error:
        raise ArtifactCorruptError(str(error)) from error
    except ArtifactCorruptError as error:
        raise ArtifactCorruptError(f"{error}; need that of digest {digest}") from error
    if found != digest:
        raise ArtifactCorruptError(f"{directory / MANIFEST_NAME}: digest {found}; need {digest}")
    return verify_directory(directory, level)


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
