"""The address of a store in a bucket: `s3://bucket/prefix`.

It contains no credentials, so it can be shared. Service and credentials come from the environment
(AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's).
"""

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from infra.errors import ConfigError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")


@dataclass(frozen=True)
class S3Address:
    """A bucket and the prefix of every key of the store, without a final slash; may be empty."""

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
