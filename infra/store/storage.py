"""Where artifacts and commit records live.

Two kinds of entry: an artifact, named by its own digest, and a commit record, named by the
fingerprint of the stage that made it. Both appear whole or not at all and never change.

Promises: publishing equal content again changes nothing; of several commits of one fingerprint
the first stands and all callers are told of it; what `committed` and `fetch` return has been
verified byte by byte; damage raises and is never taken for "not done yet".
Does not promise: room on the disk, or removal of what nobody needs any more.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError, ConfigError
from infra.faults import fault
from infra.store.artifacts import (
    EXTERNAL_KIND,
    build_manifest,
    external_artifact,
    read_manifest,
    verify_directory,
    write_manifest,
)
from infra.store.atomic import (
    abandoned_temporaries,
    create_exclusively,
    make_directories,
    publish_directory,
    temporary_sibling,
)
from infra.store.canonical import canonical_json
from infra.store.stage_spec import Artifact, CommitRecord

_log = logging.getLogger(__name__)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z][a-z0-9_-]*")
_FINGERPRINT = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")
_ABANDONED_AFTER_S = 24 * 3600.0


class Storage(Protocol):
    """What callers may ask of a store, wherever its bytes are."""

    @property
    def uri(self) -> str:
        """What `open_storage` takes to open this store again, on any host that reaches it."""
        ...

    def publish(self, source_dir: Path, kind: str, fingerprint: str | None) -> Artifact:
        """Take a directory's files into the store and say what they are called there.

        The directory is used up: the caller must not touch it afterwards, and finds the files
        again with `fetch`.

        Args:
            source_dir: a local directory of regular files.
            kind: of the artifact; lower case.
            fingerprint: the stage that made it, for the handle.

        Returns:
            The handle; equal content of one kind always has the same digest and uri.

        Raises:
            ArtifactError: the directory holds no file, or something that is not a file.
        """
        ...

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Record that a stage is done.

        Args:
            record: names an artifact that was published before.

        Returns:
            The record that stands: this one, or an earlier one of the same fingerprint.

        Raises:
            ArtifactNotFoundError: the record's artifact is not in the store.
        """
        ...

    def committed(self, fingerprint: str) -> CommitRecord | None:
        """Whether a stage is finished, and with what.

        Args:
            fingerprint: of the stage.

        Returns:
            Its record, the artifact verified now; None if the stage is not finished.

        Raises:
            ArtifactCorruptError: the stage is finished, and its record or artifact is damaged.
        """
        ...

    def fetch(self, artifact: Artifact) -> Path:
        """Bring an artifact where it can be read as files.

        Args:
            artifact: of this store, or an external one.

        Returns:
            A local directory (or an external file), verified now. It belongs to the store: the
            caller reads it and changes nothing.

        Raises:
            ArtifactNotFoundError: the store has no such artifact.
            ArtifactCorruptError: it does not verify.
        """
        ...


def open_storage(uri: str) -> Storage:
    """The store at an address.

    Args:
        uri: `/path`, `path` or `file:///path`.

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
    raise ConfigError("storage", f"got {uri!r}; need a directory or file:///directory")


class LocalStorage:
    """A store in a directory: `artifacts/<kind>/<digest>/` and `stages/<fingerprint>.json`.

    Args:
        root: created on first use.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()

    @property
    def uri(self) -> str:
        """The absolute path of the store."""
        return str(self._root)

    def publish(self, source_dir: Path, kind: str, fingerprint: str | None) -> Artifact:
        """See `Storage.publish`. On the store's own file system this is one rename, no copy."""
        _require(_KIND, kind, "artifact kind")
        manifest = build_manifest(source_dir, kind)
        write_manifest(source_dir, manifest)
        final = self._artifact_dir(kind, manifest.digest)
        make_directories(final.parent)
        if self._holds(final, manifest.digest):
            shutil.rmtree(source_dir)
        else:
            self._take_in(source_dir, final, manifest.digest)
        return Artifact(kind=kind, uri=str(final), digest=manifest.digest, fingerprint=fingerprint)

    def commit(self, record: CommitRecord) -> CommitRecord:
        """See `Storage.commit`."""
        self._check_commit(record)
        path = self._record_path(record.fingerprint)
        make_directories(path.parent)
        fault("storage.before_commit")
        if create_exclusively(path, canonical_json(record) + b"\n"):
            return self._located(record)
        standing = self._read_record(record.fingerprint)
        if standing is None:
            raise ArtifactError(f"{path} was removed while it was written; commit again")
        if standing.artifact.digest != record.artifact.digest:
            _log.warning(
                "stage %s %s was computed twice with different results: %s stands, %s does not",
                record.stage,
                record.fingerprint,
                standing.artifact.digest,
                record.artifact.digest,
            )
        return standing

    def committed(self, fingerprint: str) -> CommitRecord | None:
        """See `Storage.committed`."""
        record = self._read_record(fingerprint)
        if record is None:
            return None
        try:
            self._verified(record.artifact)
        except (ArtifactNotFoundError, ArtifactCorruptError) as error:
            raise ArtifactCorruptError(
                f"stage {record.stage} {fingerprint} is committed, but its output is damaged: "
                f"{error}; restore it, or remove {self._record_path(fingerprint)} to recompute"
            ) from error
        return record

    def fetch(self, artifact: Artifact) -> Path:
        """See `Storage.fetch`."""
        if artifact.kind != EXTERNAL_KIND:
            return self._verified(artifact)
        found = external_artifact(Path(artifact.uri))
        if found.digest != artifact.digest:
            raise ArtifactCorruptError(
                f"{artifact.uri} changed after it was planned: "
                f"digest {found.digest} != {artifact.digest}"
            )
        return Path(found.uri)

    def _artifact_dir(self, kind: str, digest: str) -> Path:
        _require(_KIND, kind, "artifact kind")
        _require(_SHA256, digest, "artifact digest")
        return self._root / "artifacts" / kind / digest

    def _record_path(self, fingerprint: str) -> Path:
        _require(_FINGERPRINT, fingerprint, "fingerprint")
        return self._root / "stages" / f"{fingerprint}.json"

    def _verified(self, artifact: Artifact) -> Path:
        directory = self._artifact_dir(artifact.kind, artifact.digest)
        try:
            directory.stat()
        except FileNotFoundError:
            raise ArtifactNotFoundError(f"{directory} is not in the store") from None
        _verify_named(directory, artifact.digest)
        return directory

    def _holds(self, final: Path, digest: str) -> bool:
        """Whether the store has these very bytes; a damaged copy is moved out of the way."""
        try:
            final.lstat()
        except FileNotFoundError:
            return False
        try:
            _verify_named(final, digest)
        except ArtifactCorruptError as error:
            aside = final.with_name(f".damaged-{temporary_sibling(final).name.lstrip('.')}")
            _log.warning("replacing a damaged artifact, kept as %s: %s", aside, error)
            # Another publisher may have been faster; its copy is as good as ours.
            with contextlib.suppress(FileNotFoundError):
                final.rename(aside)
            return False
        return True

    def _take_in(self, source_dir: Path, final: Path, digest: str) -> None:
        """Give the directory its name in the store, by rename or through a copy."""
        try:
            publish_directory(source_dir, final)
        except FileExistsError:
            _verify_named(final, digest)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_in(source_dir, final, digest)
        else:
            return
        shutil.rmtree(source_dir)

    def _copy_in(self, source_dir: Path, final: Path, digest: str) -> None:
        """Publish a verified copy of a directory that lies on another file system."""
        for old in abandoned_temporaries(final.parent, _ABANDONED_AFTER_S):
            shutil.rmtree(old, ignore_errors=True)
        temporary = temporary_sibling(final)
        try:
            shutil.copytree(source_dir, temporary, copy_function=_copy_file)
            _verify_named(temporary, digest)
            publish_directory(temporary, final)
        except FileExistsError:
            _verify_named(final, digest)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)

    def _check_commit(self, record: CommitRecord) -> None:
        """Refuse a record that names no artifact of this store."""
        artifact = record.artifact
        directory = self._artifact_dir(artifact.kind, artifact.digest)
        found = read_manifest(directory).digest
        if found != artifact.digest:
            raise ArtifactCorruptError(f"{directory}: its manifest has digest {found}")

    def _read_record(self, fingerprint: str) -> CommitRecord | None:
        path = self._record_path(fingerprint)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            record = CommitRecord.model_validate_json(data)
        except ValidationError as error:
            reason = str(error).splitlines()[0]
            raise ArtifactCorruptError(f"{path} is not a commit record: {reason}") from error
        if record.fingerprint != fingerprint:
            raise ArtifactCorruptError(f"{path} is the record of {record.fingerprint}")
        return self._located(record)

    def _located(self, record: CommitRecord) -> CommitRecord:
        """The record with the artifact's place in this store, also after the store was moved."""
        directory = self._artifact_dir(record.artifact.kind, record.artifact.digest)
        artifact = record.artifact.model_copy(update={"uri": str(directory)})
        return record.model_copy(update={"artifact": artifact})


def _require(pattern: re.Pattern[str], value: str, what: str) -> None:
    """These values become path components, so nothing but the expected form may pass."""
    if not pattern.fullmatch(value):
        raise ValueError(f"{what}: got {value!r}; need {pattern.pattern}")


def _verify_named(directory: Path, digest: str) -> None:
    """Verify a directory whose name is its digest, so that it must have a manifest."""
    try:
        found = verify_directory(directory).digest
    except ArtifactNotFoundError as error:
        raise ArtifactCorruptError(str(error)) from error
    if found != digest:
        raise ArtifactCorruptError(f"{directory} holds the artifact {found}")


def _copy_file(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    os.chmod(target, 0o644)
    fault("storage.during_copy")
    return target
