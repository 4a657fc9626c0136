"""The meaning of the answers of a service that speaks S3.

    404 of an object or upload  `AbsentError`; only an answer that names the key means absence
    404 of the bucket           `ConfigError`
    412                         `TakenError`
    409                         `ConflictError`: not decided yet
    403, no credentials         `StoreDeniedError`
    5xx, 429, no answer         `StoreUnreachableError`, after botocore's standard retries
Anything else is a plain `StoreError`; perhaps the service does not speak S3.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from infra.errors import ConfigError, StoreDeniedError, StoreError, StoreUnreachableError

_DENIED_CODES = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId"})
_DENIED = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, ProfileNotFound)
_UNREACHABLE = (ConnectionError, HTTPClientError, IncompleteReadError)


class AbsentError(StoreError):
    """The object does not exist."""


class TakenError(StoreError):
    """The object exists already."""


class ConflictError(StoreError):
    """Another caller is creating or removing the object now."""


@contextmanager
def told(place: str, endpoint: str) -> Iterator[None]:
    """Convert errors of botocore to one-line errors of this project that name the object."""
    try:
        yield
    except ClientError as error:
        raise _meaning(place, endpoint, error) from error
    except _DENIED as error:
        raise StoreDeniedError(
            f"{place}: {error}; name a profile with AWS_PROFILE, or give this machine a role"
        ) from error
    except _UNREACHABLE as error:
        reason = " ".join(str(error).split())
        raise StoreUnreachableError(
            f"{place}: {endpoint} does not answer ({reason}); see that it runs and that "
            "AWS_ENDPOINT_URL names it, then run again"
        ) from error


def _meaning(place: str, endpoint: str, error: ClientError) -> Exception:
    answer = error.response.get("Error", {})
    code, message = answer.get("Code", ""), " ".join(answer.get("Message", "").split())
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = f"{place}: {endpoint} answers {status} {code}"
    if code == "NoSuchBucket":
        return ConfigError("storage", f"{said}; create the bucket, or name another")
    if code in {"NoSuchKey", "NoSuchUpload"}:
        return AbsentError(said)
    if status == 412:
        return TakenError(said)
    if status == 409:
        return ConflictError(f"{said} ({message}); run again")
    if status in {401, 403} or code in _DENIED_CODES:
        return StoreDeniedError(
            f"{said}; let these credentials list, read, write and delete there, or name others "
            "with AWS_PROFILE"
        )
    if status == 429 or (status >= 500 and status != 501):
        return StoreUnreachableError(f"{said} ({message}); run again when it is well")
    return StoreError(f"{said} ({message}); see that AWS_ENDPOINT_URL names a service of S3")
