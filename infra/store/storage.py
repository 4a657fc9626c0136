"""Where artifacts are, and what was committed.

Promises: publishing equal content again changes nothing; `lookup` reads a stage's log and a
manifest, never the bytes of an artifact; `local_copy` gives bytes that this process has verified,
once; damage raises and is never taken for "not done yet".
Does not promise: room on the disk, or removal of what nobody needs any more.
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
from infra.plugin_table import PluginTable
from infra.plugins import Row
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
from infra.store.followers import LocalFollowers
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
"""Stores that are not directories, by the scheme of their address."""
SECOND_REFUSED = "of two who create one name the second is refused"


class Storage(Protocol):
    """What callers may ask of a store, wherever its bytes are."""

    @property
    def uri(self) -> str:
        """What `open_storage` takes to open this store again, on any host that reaches it."""
        ...

    @property
    def name(self) -> str:
        """Names the store among all others, in a few characters that suit any system."""
        ...

    @property
    def attempts(self) -> Attempts:
        """Who works on what: the logs of the stages."""
        ...

    @property
    def runs(self) -> Runs:
        """Which pipeline runs use which stages."""
        ...

    @property
    def inventory(self) -> Inventory:
        """What lies there, for whoever takes away what nobody needs."""
        ...

    def probe(self) -> str:
        """Show that the store can be written, and tells two creators of one name apart.

        Returns:
            What was seen, in one line.

        Raises:
            ConfigError: both creators succeeded, so that two attempts could own one stage.
            OSError: the store cannot be written, or not reached.
        """
        ...

    def channel(self, fingerprint: str) -> WorkChannel:
        """What the jobs of a stage and their watchers tell each other."""
        ...

    def with_steps(self) -> list[str]:
        """Fingerprints that have step checkpoints, sorted; reads names of directories only."""
        ...

    def publish(self, source: Path, kind: str, digests: Mapping[str, str] = NO_DIGESTS) -> Artifact:
        """Take a directory's files into the store and say what they are called there.

        The directory is used up: the caller must not touch it afterwards, and finds the files
        again with `local_copy`.

        Args:
            source: a local directory of regular files.
            kind: of the artifact; lower case.
            digests: sha256 by name of files that were hashed while they were written; the
                others are read once, now.

        Returns:
            The handle; equal content of one kind always has the same digest and uri.

        Raises:
            ArtifactError: the directory holds no file, or something that is not a file.
        """
        ...

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Record that a stage is done, as `Attempts.commit`, if its artifact is in the store.

        Args:
            attempt: that did it.
            record: names an artifact that was published before.

        Returns:
            The record.

        Raises:
            ArtifactNotFoundError: the record's artifact is not in the store.
            FencedError: another attempt took over.
        """
        ...

    def lookup(self, fingerprint: str, force: str = "") -> CommitRecord | None:
        """Whether a stage is finished, and with what; reads no bytes of the artifact.

        Args:
            fingerprint: of the stage.
            force: only a commit of the generation that this token asked for; empty: the latest.

        Returns:
            Its record; None if the stage is not finished.

        Raises:
            ArtifactCorruptError: the stage is finished, and its log or the artifact's manifest
                is damaged.
        """
        ...

    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """Compare an artifact with its manifest.

        Args:
            artifact: of this store.
            level: how closely.

        Returns:
            The manifest.

        Raises:
            ArtifactNotFoundError: the store has no such artifact.
            ArtifactCorruptError: it does not verify.
        """
        ...

    def local_copy(self, artifact: Artifact) -> Path:
        """Bring an artifact where it can be read as files.

        Args:
            artifact: of this store, or an external one.

        Returns:
            A local directory (or an external file), every byte verified once by this process.
            It belongs to the store: the caller reads it and changes nothing.

        Raises:
            ArtifactNotFoundError: the store has no such artifact.
            ArtifactCorruptError: it does not verify.
        """
        ...


def open_storage(uri: str) -> Storage:
    """The store at an address.

    Args:
        uri: `/path`, `path`, `file:///path` or `s3://bucket/prefix`.

    Returns:
        The store; its directory is made when something is published.

    Raises:
        ConfigError: no store of that scheme is known.
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
    """What is asked of any store about finished stages, by their logs."""

    attempts: Attempts

    @abstractmethod
    def verify(self, artifact: Artifact, level: Level) -> Manifest:
        """See `Storage.verify`."""

    @abstractmethod
    def _place(self, kind: str, digest: str) -> str:
        """Where the store has, or would have, an artifact."""

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
        """The record with the artifact's place in this store, also after the store was moved."""
        place = self._place(record.artifact.kind, record.artifact.digest)
        artifact = record.artifact.model_copy(
            update={"uri": place, "fingerprint": record.fingerprint}
        )
        return record.model_copy(update={"artifact": artifact})


class LocalStorage(StageResults):
    """A store in a directory: `artifacts/<kind>/<digest>/`, `stages/<fingerprint>/`, `work/`.

    Args:
        root: created on first use.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        followers = LocalFollowers(self._root / "work")
        self.attempts = StageLogs(LocalLogFiles(self._root), followers, self._journal_bytes)
        self.runs = LocalRuns(self._root)
        self.inventory = LocalInventory(self._root)
        self._verified: set[tuple[str, str]] = set()

    @property
    def uri(self) -> str:
        """The absolute path of the store."""
        return str(self._root)

    @property
    def name(self) -> str:
        """Made once per store, so that two stores of equal paths on two machines differ."""
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
        """See `Storage.publish`. On the store's own file system this is one rename, no copy."""
        require(KIND, kind, "artifact kind")
        fault("storage.before_publish")
        manifest = build_manifest(source, kind, digests)
        write_manifest(source, manifest)
        final = self._artifact_dir(kind, manifest.digest)
        make_directories(final.parent)
        if self._holds(final, manifest.digest):
            # Whoever published it may have died before its name was durable.
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
        """Whether the store has these very bytes; a damaged copy is moved out of the way."""
        try:
            final.lstat()
        except FileNotFoundError:
            return False
        try:
            verify_named(final, digest)
        except ArtifactCorruptError as error:
            aside = final.with_name(f".damaged-{temporary_sibling(final).name.lstrip('.')}")
            _log.warning("replacing a damaged artifact, kept as %s: %s", aside, error)
            # Another publisher may have been faster; its copy is as good as ours.
            with contextlib.suppress(FileNotFoundError):
                final.rename(aside)
            return False
        try:
            os.utime(final)  # whoever collects garbage sees that it was just needed
        except FileNotFoundError:
            return False
        return True

    def _take_in(self, source_dir: Path, final: Path, digest: str) -> None:
        """Give the directory its name in the store, by rename or through a copy."""
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
        """Publish a verified copy of a directory that lies on another file system."""
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
    """These values become path components, so nothing but the expected form may pass."""
    if not pattern.fullmatch(value):
        raise ValueError(f"{what}: got {value!r}; need {pattern.pattern}")


def verify_named(directory: Path, digest: str, level: Level = "bytes") -> Manifest:
    """Verify a directory below the name of its kind that must have the manifest of that digest."""
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
    """Refuse an external input whose bytes are others than when it was planned.

    Args:
        artifact: of `external_artifact`.

    Raises:
        ArtifactCorruptError: they are.
        ConfigError: nothing is there.
    """
    found = external_artifact(Path(artifact.uri))
    if found.digest != artifact.digest:
        raise ArtifactCorruptError(
            f"{artifact.uri} changed after it was planned: "
            f"digest {found.digest} != {artifact.digest}; run again once nobody writes to it"
        )


def _copy_file(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    os.chmod(target, 0o644)
    fault("storage.during_copy")
    return target
