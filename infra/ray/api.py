"""HTTP client of a Ray head: its version, its job server, and the server's typed answers.

Plain HTTP avoids `import ray` (a second of CPU) in the control plane. The token is sent in a header
and appears in no URL, error text or log. Every call has a timeout and is not retried.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from infra import env
from infra.errors import ConfigError, JobSubmitError
from infra.host.ports import NO_ANSWER, exchange

REQUEST_TIMEOUT_S = 30.0
"""Long enough for a submission: the head itself waits 10 s for its job agent."""


class RayUnreachableError(JobSubmitError):
    """The Ray head does not answer."""


class RayResponseError(JobSubmitError):
    """The Ray head answered with an HTTP error; `reason` is the last line of the answer."""

    def __init__(self, what: str, status: int, reason: str) -> None:
        super().__init__(f"{what}: Ray answered {status}: {reason}")
        self.status = status
        self.reason = reason

    def __reduce__(self) -> tuple[type["RayResponseError"], tuple[str, int, str]]:
        return (RayResponseError, (str(self).partition(": Ray")[0], self.status, self.reason))


class RayApi:
    """Client of a Ray head's dashboard (`http(s)://host:port`); a token of None sends none."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._token = token
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in {"http", "https"} or not parts.hostname or port is None:
            raise ConfigError(
                "ray.address", f"got {url!r}; need the dashboard, like http://127.0.0.1:8265"
            )

    def version(self, timeout_s: float = 5.0) -> str:
        """Return the head's Ray version; a success proves that it answers and accepts the token."""
        answer = self.call("GET", "/api/version", timeout_s=timeout_s)
        if not isinstance(answer, dict) or "ray_version" not in answer:
            raise ConfigError("ray.address", f"{self.url} is no Ray head; need one; change it")
        return str(answer["ray_version"])

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Any:
        """Send a request; return the decoded JSON answer, or its text if it is not JSON.

        `timeout_s` limits the connection and each read. `path` starts with a slash.

        Raises:
            RayUnreachableError: no answer within `timeout_s`.
            RayResponseError: the status is not 200.
            ConfigError: the head refuses the token.
        """
        try:
            status, content = exchange(method, self.url + path, body, self._token, timeout_s)
        except NO_ANSWER as error:
            raise RayUnreachableError(
                f"Ray at {self.url} does not answer: {str(error) or type(error).__name__}"
            ) from error
        text = content.decode("utf-8", errors="replace")
        if status in {401, 403}:
            raise ConfigError(
                "ray.address",
                f"{self.url} answered {status}: its token is missing or wrong here; set "
                "RAY_AUTH_TOKEN to it, or unset that and set RAY_AUTH_TOKEN_PATH to its file",
            )
        if status != 200:
            lines = [line for line in text.splitlines() if len(line.strip()) > 1]
            raise RayResponseError(f"{method} {self.url}{path}", status, (lines or [""])[-1])
        try:
            return json.loads(text)
        except ValueError:
            return text


def existing_token() -> str | None:
    """Return an existing cluster's token; None without one, ConfigError if its file is absent."""
    if value := env.RAY_AUTH_TOKEN.get():
        return value.strip()
    named = env.RAY_AUTH_TOKEN_PATH.get()
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        if named:
            raise ConfigError(
                "environment.RAY_AUTH_TOKEN_PATH",
                f"{named} does not exist; set it to the file with the token of the Ray cluster",
            ) from None
        return None


class JobState(StrEnum):
    """Ray's states of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class JobRequest(NamedTuple):
    """A job to submit."""

    argv: Sequence[str]
    """Absolute path of the program (`sys.executable`), and its arguments."""
    env: Mapping[str, str]
    """Variables added to the cluster's environment. No secrets: everyone who may list jobs can read
    them."""
    metadata: Mapping[str, str]
    """Stored with the job and shown by Ray's tools."""
    resources: Mapping[str, Any] = {}
    """`ray.remote` arguments that reserve resources; if empty, the job runs on the head node."""


@dataclass(frozen=True)
class JobStatus:
    """Ray's record of a job; for a failed job the message is the tail of its log.

    `exit_code` is that of the entry point, -9 after SIGKILL; None while it runs or if stopped.
    """

    submission_id: str
    state: JobState
    message: str
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended."""
        return self.state not in {JobState.PENDING, JobState.RUNNING}
