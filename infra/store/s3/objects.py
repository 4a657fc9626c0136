"""The objects of a store in a bucket, at an address `s3://bucket/prefix`.

The address contains no credentials, so it can be shared. Service and credentials come from the
environment (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's). The answers of a service mean:

    404 of an object or upload  `AbsentError`; only an answer that names the key means absence
    404 of the bucket           `ConfigError`
    412                         `TakenError`
    409                         `ConflictError`: not decided yet
    401, 403, bad credentials   `StoreDeniedError`
    5xx, 429, no answer         `StoreUnreachableError`, after botocore's standard retries
    anything else               `StoreError`; perhaps the service does not speak S3

Promises: an object appears completely or not at all. Of several callers that create one name
exactly one succeeds; a caller without an answer reads the object and owns it if the bytes are its
own. A service that ignores conditions is refused before anything relies on it.
Does not promise: that parts of a killed large upload vanish by themselves. They are invisible;
`rlhf gc` or a lifecycle rule (`AbortIncompleteMultipartUpload`) removes them.
"""

import base64
import functools
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Self
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from infra import env
from infra.errors import (
    ArtifactCorruptError,
    ArtifactNotFoundError,
    ConfigError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
    on_failure,
)
from infra.store.artifacts import MANIFEST_NAME, FileEntry, Manifest, parse_manifest
from infra.store.files import Files, Found

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
CREATE_DEADLINE_S = 60.0
"""Time limit to find out whether a create succeeded."""
CREATE_POLL_S = 0.2
PART_BYTES = 32 * 2**20
"""Larger files are transferred in parts of this size; S3 requires at least 5 MiB."""
MAX_PARTS = 9_000
MAX_DELETED = 1000
NUM_READS = 3
_opening = threading.Lock()
_DENIED = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, ProfileNotFound)
_UNREACHABLE = (ConnectionError, HTTPClientError, IncompleteReadError)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")


@dataclass(frozen=True)
class S3Address:
    """A bucket, and the prefix (perhaps empty, without final slash) of all keys of the store."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Parse `s3://bucket/prefix`; `ConfigError` if it is invalid or holds credentials."""
        need = "need s3://bucket/prefix"
        parts = urlsplit(uri)
        if "@" in uri or parts.query or parts.fragment:
            raise ConfigError(
                "storage",
                f"got an s3:// address with more than a bucket and a prefix; {need}; leave the "
                "credentials to AWS_PROFILE, a role, or what else the environment offers",
            )
        prefix = parts.path.strip("/")
        if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
            raise ConfigError("storage", f"got {uri!r}; {need}, the bucket 3-63 of a-z 0-9 . -")
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError("storage", f"got {uri!r}; {need}, the prefix plain names and /")
        return cls(parts.netloc, prefix)

    @property
    def uri(self) -> str:
        """The canonical text of the address."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """Return the full key of a name in the store."""
        return f"{self.prefix}/{name}" if self.prefix else name


class AbsentError(StoreError):
    """The object or upload does not exist."""


class TakenError(StoreError):
    """The object exists already."""


class ConflictError(StoreError):
    """Another caller is creating or removing the object now."""


@contextmanager
def told(place: str, endpoint: str) -> Iterator[None]:
    """Raise errors of botocore as `StoreError` or `ConfigError`, in one line with the object."""
    try:
        yield
    except ClientError as error:
        raise _meaning(place, endpoint, error) from error
    except _DENIED as error:
        raise StoreDeniedError(
            f"{place}: {error}; name a profile with AWS_PROFILE, or give this machine a role"
        ) from error
    except _UNREACHABLE as error:
        raise StoreUnreachableError(
            f"{place}: {endpoint} does not answer ({' '.join(str(error).split())}); see that it "
            "runs and that "
            "AWS_ENDPOINT_URL names it, then run again"
        ) from error


def _meaning(place: str, endpoint: str, error: ClientError) -> Exception:
    answer = error.response.get("Error", {})
    code, message = answer.get("Code", ""), " ".join(answer.get("Message", "").split())
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = f"{place}: {endpoint} answers {status} {code}"
    match status, code:
        case _, "NoSuchBucket":
            return ConfigError("storage", f"{said}; create the bucket, or name another")
        case _, "NoSuchKey" | "NoSuchUpload":
            return AbsentError(said)
        case 412, _:
            return TakenError(said)
        case 409, _:
            return ConflictError(f"{said} ({message}); run again")
        case (401 | 403, _) | (_, "ExpiredToken" | "InvalidToken" | "InvalidAccessKeyId"):
            return StoreDeniedError(
                f"{said}; let these credentials list, read, write and delete there, or name others "
                "with AWS_PROFILE"
            )
        case _ if status == 429 or (status >= 500 and status != 501):
            return StoreUnreachableError(f"{said} ({message}); run again when it answers")
    return StoreError(f"{said} ({message}); see that AWS_ENDPOINT_URL names a service of S3")


class Unfinished(NamedTuple):
    """A multipart upload that was not ended; `begun_at`: service time, seconds since the epoch."""

    name: str
    upload: str
    size_bytes: int
    begun_at: float


class Objects(Files):
    """The objects below an address; all methods raise `StoreError` if the service fails."""

    def __init__(self, address: S3Address) -> None:
        self.address = address
        self._honours_conditions = False
        endpoint = env.AWS_ENDPOINT_URL_S3.get() or env.AWS_ENDPOINT_URL.get() or ""
        with told(self.place(""), endpoint), _opening:
            self._client = _client(endpoint, env.AWS_PROFILE.get(), os.getpid())

    @property
    def endpoint(self) -> str:
        """Address of the service."""
        return self._client.meta.endpoint_url

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Return an object, or with `end` its bytes `start` to `end`; None if it is absent."""
        stretch = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
        for remaining in reversed(range(NUM_READS)):
            try:
                with self._told(name):
                    body = self._client.get_object(**self._at(name), **stretch)["Body"]
            except AbsentError:
                return None
            try:
                with self._told(name):
                    return body.read()
            except StoreUnreachableError:  # botocore retries requests, but not reads of the body
                if not remaining:
                    raise
        raise AssertionError

    def part(self, name: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end`; raise `ArtifactCorruptError` if the object lacks them."""
        data = self.get(name, start, end)
        if data is None or len(data) != end - start:
            raise ArtifactCorruptError(f"{self.place(name)} lost bytes {start} to {end}")
        return data

    def manifest(self, directory: str, kind: str, digest: str) -> Manifest:
        """Return the manifest of a directory.

        Raises:
            ArtifactNotFoundError: there is none.
            ArtifactCorruptError: it is damaged, or has another kind or digest.
        """
        data = self.get(f"{directory}/{MANIFEST_NAME}")
        where = self.place(f"{directory}/{MANIFEST_NAME}")
        if data is None:
            raise ArtifactNotFoundError(f"{where} is not in the store")
        manifest = parse_manifest(data, where, kind)
        if manifest.digest != digest:
            raise ArtifactCorruptError(f"{where} has digest {manifest.digest}; need {digest}")
        return manifest

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object; the service verifies its sha256."""
        with self._told(name):
            self._put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless the name is taken; return True if it has these bytes now.

        Callers that must be told apart need different bytes.

        Raises:
            ConfigError: the service ignores the condition.
            StoreError: after `CREATE_DEADLINE_S` the outcome is unknown.
        """
        self.require_conditions()
        ends_at = time.monotonic() + CREATE_DEADLINE_S
        while True:
            try:
                with self._told(name):
                    self._put(name, data, IfNoneMatch="*")
                return True
            except (TakenError, ConflictError, StoreUnreachableError) as error:
                # The answer was lost, or a retry by botocore met its own first request.
                with suppress(StoreUnreachableError):
                    standing = self.get(name)
                    if standing is not None:
                        return standing == data
                if time.monotonic() > ends_at:
                    raise StoreUnreachableError(str(error)) from error
            time.sleep(CREATE_POLL_S)

    def require_conditions(self) -> None:
        """Raise `ConfigError` if the service ignores conditional writes; tested once."""
        if self._honours_conditions:
            return
        name = f"probes/{uuid.uuid4().hex}"
        try:
            with suppress(TakenError, ConflictError):
                for data in (b"first", b"second"):
                    with self._told(name):
                        self._put(name, data, IfNoneMatch="*")
                raise ConfigError(
                    "storage",
                    f"{self.endpoint} ignores If-None-Match, so that two attempts could own one "
                    "stage; need a service that honours conditional writes",
                )
        finally:
            with suppress(StoreError):
                self.delete([name])
        self._honours_conditions = True

    def upload(self, path: Path, name: str, entry: FileEntry) -> None:
        """Upload a file, comparing each byte with its entry; after an error nothing is visible.

        Raises:
            ArtifactCorruptError: the file has changed.
        """
        if entry.size_bytes > PART_BYTES:
            with self._told(name), path.open("rb") as file:
                self._upload_parts(file, name, entry)
            return
        data = path.read_bytes()
        compare(str(path), hashlib.sha256(data).hexdigest(), entry)
        self.put(name, data)

    def listed(self, prefix: str, after: str = "") -> list[Found]:
        """Return the objects whose names have a prefix and sort after `after`, sorted by name."""
        start = {"StartAfter": self.address.key(after)} if after else {}
        cut = len(self.address.key(""))
        return [
            Found(each["Key"][cut:], each["Size"], each["LastModified"].timestamp())
            for page in self._pages(prefix, **start)
            for each in page.get("Contents", ())
        ]

    def children(self, prefix: str) -> list[str]:
        """Return the next path components below a prefix that ends with a slash, sorted."""
        return [
            PurePosixPath(each["Prefix"]).name
            for page in self._pages(prefix, Delimiter="/")
            for each in page.get("CommonPrefixes", ())
        ]

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, which may be absent."""
        for at in range(0, len(names), MAX_DELETED):
            keys = [{"Key": self.address.key(name)} for name in names[at : at + MAX_DELETED]]
            with self._told(names[at]):
                answer = self._client.delete_objects(
                    Bucket=self.address.bucket, Delete={"Objects": keys, "Quiet": True}
                )
            for error in answer.get("Errors", ()):
                raise StoreError(f"{self.place(names[at])}: not removed: {error.get('Message')}")

    def remove(self, directory: str) -> None:
        """Remove the objects below a directory, in the order of their names."""
        self.delete([each.name for each in self.listed(f"{directory}/")])

    def unfinished(self, before: float) -> list[Unfinished]:
        """Return multipart uploads begun before a time (seconds since the epoch) and not ended."""
        cut, found = len(self.address.key("")), list[Unfinished]()
        with self._told(""):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=self.address.key("")
            )
            uploads = [each for page in pages for each in page.get("Uploads", ())]
        for each in uploads:
            name, upload = each["Key"][cut:], each["UploadId"]
            begun_at = each["Initiated"].timestamp()
            if begun_at < before:
                with suppress(AbsentError), self._told(name):
                    parts = self._client.get_paginator("list_parts").paginate(
                        **self._at(name), UploadId=upload
                    )
                    size_bytes = sum(one["Size"] for page in parts for one in page.get("Parts", ()))
                    found.append(Unfinished(name, upload, size_bytes, begun_at))
        return found

    def abort(self, each: Unfinished) -> None:
        """Abort a multipart upload, which may have ended."""
        with suppress(AbsentError), self._told(each.name):
            self._client.abort_multipart_upload(**self._at(each.name), UploadId=each.upload)

    def place(self, name: str) -> str:
        """Return the `s3://` URI of an object, for messages."""
        return f"s3://{self.address.bucket}/{self.address.key(name)}"

    def _pages(self, prefix: str, **more: str) -> Iterator[Mapping[str, Any]]:
        with self._told(prefix):
            yield from self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=self.address.key(prefix), **more
            )

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.address.bucket, "Key": self.address.key(name)}

    def _put(self, name: str, data: bytes, **condition: str) -> None:
        self._client.put_object(
            **self._at(name), Body=data, ChecksumSHA256=_checksum(data), **condition
        )

    def _upload_parts(self, file: IO[bytes], name: str, entry: FileEntry) -> None:
        at, client = self._at(name), self._client
        upload = client.create_multipart_upload(**at, ChecksumAlgorithm="SHA256")["UploadId"]

        def abandon(_: BaseException) -> None:
            with suppress(BotoCoreError, ClientError):
                client.abort_multipart_upload(**at, UploadId=upload)

        with on_failure(abandon):
            whole, parts = hashlib.sha256(), []
            size_bytes = max(PART_BYTES, -(-entry.size_bytes // MAX_PARTS))
            while data := file.read(size_bytes):
                whole.update(data)
                part = {"PartNumber": len(parts) + 1, "ChecksumSHA256": _checksum(data)}
                sent = client.upload_part(**at, UploadId=upload, Body=data, **part)
                parts.append({**part, "ETag": sent["ETag"]})
            compare(file.name, whole.hexdigest(), entry)
            client.complete_multipart_upload(
                **at, UploadId=upload, MultipartUpload={"Parts": parts}
            )

    def _told(self, name: str) -> AbstractContextManager[None]:
        return told(self.place(name), self.endpoint)


@functools.cache
def _client(endpoint: str, profile: str | None, process: int) -> Any:
    """Return a client, cached per process: it is thread-safe, but a fork must not share it."""
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard"},
        # Other services may not resolve bucket names as hosts.
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    return _session(profile).client("s3", config=config)


@functools.cache  # loads the service's operations and the credentials: the costly part
def _session(profile: str | None) -> Any:
    return boto3.Session(profile_name=profile)


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def compare(where: str, sha256: str, entry: FileEntry) -> None:
    """Raise `ArtifactCorruptError` if a digest is not that of the manifest's entry."""
    if sha256 != entry.sha256:
        raise ArtifactCorruptError(
            f"{where}: sha256 {sha256}; need {entry.sha256}, going by the manifest"
        )
