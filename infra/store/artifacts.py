"""Artifacts: a directory of regular files and a manifest with the size and sha256 of each file.

Promises: equal content has an equal digest; `verify_directory` of `bytes` detects flipped bits,
truncation, swapped, missing and extra files, and links; a read error stays an `OSError`
and never counts as an absent or damaged file.
Does not promise: anything about file modes, times or empty directories; they are not content. The
digest covers (schema, kind, files), so files must not contain what varies between equal runs. Nor
that bits that flip on the disk below a large external file are noticed: its sha256 is cached by
path, size, times and inode.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from infra import env
from infra.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError, ConfigError
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.store.canonical import canonical_json, sha256_json
from infra.store.stage_spec import Artifact

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1
EXTERNAL_KIND = "external"
_STORED = re.compile(r"/artifacts/[a-z][a-z0-9_-]*/(?P<digest>[0-9a-f]{64})(?:/|$)")
MIN_BYTES = 1 << 20
"""Hashing a smaller file is faster than the cache lookup."""
SETTLED_NS = 2_000_000_000
"""A younger file is not cached: another write may fall into the same tick of its timestamp."""
NUM_HASH_THREADS = min(8, os.cpu_count() or 1)

Level = Literal["manifest", "size", "bytes"]
"""What is checked: only the manifest; also names and sizes; or every byte."""


def _check_name(name: str) -> str:
    """Refuse names that could point outside the directory or that have several spellings."""
    parts = PurePosixPath(name).parts
    if (
        not name
        or name.startswith("/")
        or "/".join(parts) != name
        or ".." in parts
        or "\\" in name
        or not name.isprintable()
        or name == MANIFEST_NAME
    ):
        raise ValueError(f"{name!r} is not a plain relative path")
    return name


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, AfterValidator(_check_name)]
Kind = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$")]


class FileEntry(FrozenModel, strict=True):
    """Size and sha256 of one file."""

    size_bytes: int = Field(ge=0)
    sha256: Sha256


class Manifest(FrozenModel, strict=True, populate_by_name=True, serialize_by_alias=True):
    """List of an artifact's files; it is written last, so if it exists, all files do."""

    schema_version: int = Field(default=MANIFEST_SCHEMA, alias="schema")
    kind: Kind
    files: Mapping[RelativePath, FileEntry]
    """Files by path relative to the directory, with forward slashes; without the manifest."""

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON of (schema, kind, files): the artifact's identity."""
        return sha256_json(self)

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        return canonical_json(self) + b"\n"


def build_manifest(
    directory: Path, kind: str, digests: Mapping[str, str] | None = None
) -> Manifest:
    """Hash the files of a directory into a new manifest; `digests` has known sha256 by name.

    Raises:
        ArtifactError: no file, an entry is not a regular file, or a name is not portable.
    """
    paths: dict[str, Path] = {}
    for name, entry in (found for found in _walk(directory) if found[0] != MANIFEST_NAME):
        if not entry.is_file(follow_symlinks=False):
            raise ArtifactError(f"{entry.path} is not a regular file; need regular files only")
        paths[name] = Path(entry.path)
    if not paths:
        raise ArtifactError(f"{directory} holds no file; an empty artifact is a mistake")
    known = {} if digests is None else {name: digests[name] for name in digests.keys() & paths}
    files = _hash_all({name: path for name, path in paths.items() if name not in known})
    for name, digest in known.items():
        files[name] = FileEntry(size_bytes=paths[name].stat().st_size, sha256=digest)
    fault("artifacts.before_manifest")
    try:
        return Manifest(kind=kind, files=files)
    except ValidationError as error:
        raise ArtifactError(f"{directory}: {error.errors()[0]['msg']}") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest durably and in place; a leftover temporary file would become content."""
    with (directory / MANIFEST_NAME).open("wb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """Parse the manifest of a directory, without looking at the files.

    Raises:
        ArtifactNotFoundError: there is no manifest. Other errors are those of `parse_manifest`.
    """
    path = directory / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactNotFoundError(f"{directory} has no {MANIFEST_NAME}") from None
    return parse_manifest(data, str(path), kind)


def parse_manifest(data: bytes, where: str, kind: str | None = None) -> Manifest:
    """Parse the bytes of a manifest file; `kind` is the required kind, None accepts any.

    Raises:
        ArtifactCorruptError: the bytes are not what this code writes.
        ArtifactError: a newer version of this program wrote it.
    """
    schema = None
    try:
        values = dict(json.loads(data))
        schema = values.get("schema")
        # A newer schema differs in more than its number; a damaged number differs in nothing else.
        values |= {"schema": MANIFEST_SCHEMA} | ({"kind": kind} if kind else {})
        manifest = Manifest.model_validate(values)
    except (TypeError, ValueError, RecursionError) as error:  # of JSON and of pydantic: ValueError
        if isinstance(schema, int) and schema > MANIFEST_SCHEMA:
            raise ArtifactError(
                f"{where} has schema {schema}; this code reads <= {MANIFEST_SCHEMA}"
            ) from None
        raise _damaged(where, data, str(error).splitlines()[0]) from error
    if data != manifest.to_bytes():
        raise _damaged(where, data, "another kind, schema or spelling")
    return manifest


def _damaged(where: str, data: bytes, reason: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{where} is no valid manifest ({reason}); its sha256 is {hashlib.sha256(data).hexdigest()}"
    )


def verify_directory(
    directory: Path,
    level: Level = "bytes",
    kind: str | None = None,
    manifest: Manifest | None = None,
) -> Manifest:
    """Compare a directory with its manifest, which is returned; None as `kind` accepts any kind.

    A `manifest` that the caller has just read is not read again.

    Raises:
        ArtifactNotFoundError: there is no manifest.
        ArtifactCorruptError: the text names a file that is altered, missing, extra or not
            regular.
        OSError: a file could not be read; nothing is known about its content.
    """
    try:
        manifest = manifest or read_manifest(directory, kind)
        present = {} if level == "manifest" else _listed(directory, manifest)
    except ArtifactCorruptError as error:
        if level == "bytes" and kind is not None:
            raise _with_digests(error, directory, kind) from error
        raise
    for name, entry in present.items():
        try:
            size_bytes = entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            raise ArtifactCorruptError(f"{entry.path} vanished while it was verified") from None
        if size_bytes != manifest.files[name].size_bytes:
            _check_entry(entry, _hash_regular(Path(entry.path)), manifest.files[name])
    if level == "bytes":
        found = _hash_all({name: Path(entry.path) for name, entry in present.items()})
        for name, entry in present.items():
            _check_entry(entry, found[name], manifest.files[name])
    return manifest


def _listed(directory: Path, manifest: Manifest) -> "dict[str, os.DirEntry[str]]":
    present = {}
    for name, entry in _walk(directory):
        if name == MANIFEST_NAME and entry.is_file(follow_symlinks=False):
            continue
        if name not in manifest.files:
            raise ArtifactCorruptError(f"{entry.path} is not in the manifest")
        if not entry.is_file(follow_symlinks=False):
            raise ArtifactCorruptError(f"{entry.path} is no longer a regular file")
        present[name] = entry
    missing = sorted(set(manifest.files) - set(present))
    if missing:
        raise ArtifactCorruptError(
            f"{directory} lacks {len(missing)} of {len(manifest.files)} files: {missing[0]}"
        )
    return present


def _with_digests(error: ArtifactCorruptError, directory: Path, kind: str) -> ArtifactCorruptError:
    try:
        need = hashlib.sha256(build_manifest(directory, kind).to_bytes()).hexdigest()
    except ArtifactError:
        return error
    found = _hash_regular(directory / MANIFEST_NAME).sha256
    return ArtifactCorruptError(
        f"{error}; {MANIFEST_NAME} has sha256 {found}, its files need {need}"
    )


def external_artifact(path: Path, field: str | None = None) -> Artifact:
    """Return a handle of kind `external` to a user's file or directory outside the store.

    The digest covers only the content, not its location. In a directory, entries that start with a
    dot are skipped (a hub download keeps times there) and links to files are followed (a hub cache
    consists of them). `field` is the configuration field that named the path, for errors.

    Raises:
        ConfigError: the path does not exist, holds no file, or contains a link to a directory.
    """
    path = path.expanduser().absolute()
    where = field or str(path)
    if not path.exists():
        raise ConfigError(where, f"{path} does not exist (cwd is {Path.cwd()}); give another path")
    paths = {"": path} if path.is_file() else dict(_external_files(path, where))
    files = _hash_all(paths, _hash_external)
    if not files:
        raise ConfigError(where, f"{path} holds no file; give another path")
    digest = sha256_json({"schema": MANIFEST_SCHEMA, "kind": EXTERNAL_KIND, "files": files})
    return Artifact(kind=EXTERNAL_KIND, uri=str(path), digest=digest)


def digest_in_path(path: str) -> str | None:
    """Return the digest in a path below `artifacts/<kind>/<digest>` of any store, or None."""
    found = _STORED.search(path)
    return found["digest"] if found else None


def _external_files(directory: Path, where: str) -> Iterator[tuple[str, Path]]:
    for name, entry in _walk(directory, hidden=False):
        if entry.is_dir():
            raise ConfigError(where, f"{entry.path} is a link to a directory; copy or name it")
        if not entry.is_file():
            raise ConfigError(where, f"{entry.path} is not a readable file; remove it")
        yield name, Path(entry.path)


def _hash_external(path: Path) -> FileEntry:
    return FileEntry(
        size_bytes=path.stat().st_size,
        sha256=digest_once(path, lambda: _hash_regular(path).sha256),
    )


def _walk(
    directory: Path, prefix: str = "", hidden: bool = True
) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    with os.scandir(directory) as entries:
        shown = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    for entry in sorted(shown, key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", hidden)
        else:
            yield f"{prefix}{entry.name}", entry


def _hash_regular(path: Path) -> FileEntry:
    # Non-blocking: if a pipe replaced the file, the open must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtifactError(f"{path} is not a regular file")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size_bytes=file.tell(), sha256=digest)


def _hash_all(
    paths: Mapping[str, Path], hash_file: Callable[[Path], FileEntry] = _hash_regular
) -> dict[str, FileEntry]:
    if len(paths) < 2:  # without a thread, Ctrl-C ends the hashing of a large file at once
        return {name: hash_file(path) for name, path in paths.items()}
    with ThreadPoolExecutor(NUM_HASH_THREADS, "hash") as pool:
        return dict(zip(paths, pool.map(hash_file, paths.values()), strict=True))


def _check_entry(entry: "os.DirEntry[str]", found: FileEntry, expected: FileEntry) -> None:
    if found != expected:
        raise ArtifactCorruptError(
            f"{entry.path}: {found.size_bytes} bytes, sha256 {found.sha256}; need "
            f"{expected.size_bytes} bytes, sha256 {expected.sha256}, going by {MANIFEST_NAME}"
        )


def digest_once(path: Path, compute: Callable[[], str]) -> str:
    """Return a regular file's sha256 (64 hex digits) from the home's cache, else from `compute`."""
    status = path.stat()
    if status.st_size < MIN_BYTES:
        return compute()
    times = [status.st_mtime_ns, status.st_ctime_ns]
    key = sha256_json([os.fspath(path), status.st_size, *times, status.st_ino])
    record = env.home() / "digests" / key
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = record.read_text(encoding="ascii")
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    digest = compute()
    if time.time_ns() - max(times) > SETTLED_NS and env.home().is_dir():
        with contextlib.suppress(OSError):
            record.parent.mkdir(exist_ok=True)
            temporary = record.with_name(f".tmp-{key}-{os.getpid()}")
            temporary.write_text(digest, encoding="ascii")
            os.replace(temporary, record)
    return digest
