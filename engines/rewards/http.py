"""Reward `http`: a server of the user scores the samples, by at least one POST for each.

The server gets an object of `data_source`, `solution_str`, `ground_truth` and `extra_info`, and
answers like a reward function: a number, or an object with `score` and further numbers.
Promises: a slow, broken or missing server leaves samples unscored, never 0. A request that failed
in transport, or got 429 or 5xx, is repeated with growing pauses within `rl.reward.timeout_s`. At
most `rl.reward.num_workers` requests run at once, by default one per core and at most 16; set 1
for a server that takes one at a time.
"""

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import httpx2

from infra import env

_MAX_REPLY_BYTES = 1 << 20
_LONGEST_PAUSE_S = 10.0
_BUSY, _SERVER_ERRORS = 429, 500


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str,
    token_variable: str | None = None,
    max_num_retries: int = 3,
    backoff_s: float = 0.5,
    connect_timeout_s: float = 5.0,
) -> Any:
    """Post the sample and return the server's answer. Options: see `HttpOptions`.

    Raises:
        ValueError: the token is not set, or the answer is not JSON or too long.
        ConnectionError: no try was answered with 2xx.
    """
    client = _client(_token(token_variable), connect_timeout_s)
    content = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": dict(extra_info or {}),
    }
    attempt, problem = 0, ""
    for attempt in range(max_num_retries + 1):
        if attempt:
            time.sleep(min(_LONGEST_PAUSE_S, backoff_s * 2 ** (attempt - 1)))
        try:
            with client.stream("POST", url, json=content) as reply:
                if reply.is_success:
                    return _parsed(reply)
                problem = f"answered {reply.status_code}"
                if reply.status_code != _BUSY and reply.status_code < _SERVER_ERRORS:
                    break
        except httpx2.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
    raise ConnectionError(
        f"the reward server at {httpx2.URL(url).host}: {problem} (try {attempt + 1})"
    )


def _parsed(reply: httpx2.Response) -> Any:
    content = b""
    for part in reply.iter_bytes():
        content += part
        if len(content) > _MAX_REPLY_BYTES:
            raise ValueError(f"the reward server answered more than {_MAX_REPLY_BYTES} bytes")
    try:
        return json.loads(content)
    except ValueError:
        raise ValueError(f"the reward server answered no JSON: {content[:80]!r}") from None


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = env.child_environment().get(variable)
    if not token:
        raise ValueError(
            f"the environment variable {variable} is not set here; set it, and name it in "
            "rl.reward.environment"
        )
    return token


@lru_cache(maxsize=1)
def _client(token: str | None, connect_timeout_s: float) -> httpx2.Client:
    """Return the client shared by all samples of a process, so that the connection stays open."""
    # Only connecting has its own timeout; the sample's deadline ends the process.
    timeout = httpx2.Timeout(None, connect=connect_timeout_s)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx2.Client(timeout=timeout, headers=headers, trust_env=False)
