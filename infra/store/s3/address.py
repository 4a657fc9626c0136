"""Where a store in a bucket is: `s3://bucket/prefix`.

Promises: an address holds no credentials, and one that does is refused without being repeated.
The service is that of the environment (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's), and
so are the credentials, so an address can be shared.
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
    """A bucket, and a part of it.

    Attributes:
        bucket: its name.
        prefix: what every key of the store begins with, without a slash at the end; may be empty.
    """

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, uri: str) -> Self:
        """The address in a text.

        Args:
            uri: `s3://bucket` or `s3://bucket/prefix`.

        Returns:
            The address.

        Raises:
            ConfigError: it is none, or holds credentials.
        """
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
        """The one text of the address."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The whole key of something in the store."""
        return f"{self.prefix}/{name}" if self.prefix else name
