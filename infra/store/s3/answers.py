"""What the answers of a service that speaks S3 mean.

    404 of an object     `AbsentError`; of an upload too
    412                  `TakenError`
    409                  `ConflictError`: it has not decided yet
    403, no credentials  `StoreDeniedError`
    5xx, 429, no answer  `StoreUnreachableError`, after the attempts of botocore's standard mode
    404 of the bucket    `ConfigError`
    anything else        `StoreError`: perhaps no service that speaks S3

Promises: only an answer that names the key is taken for absence. A line names bucket and key.
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
    """There is no such object."""


class TakenError(StoreError):
    """There is such an object already."""


class ConflictError(StoreError):
    """Another caller is making or removing that object just now."""


@contextmanager
def told(place: str, endpoint: str) -> Iterator[None]:
    """Raise an error of ours, in one line, for one of botocore's.

    Args:
        place: what is asked for, as people call it.
        endpoint: address of the service.
    """
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
