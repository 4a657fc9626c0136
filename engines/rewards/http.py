"""Reward `http`: a server of yours judges; one POST a sample.

The server gets an object of `data_source`, `solution_str`, `ground_truth` and `extra_info`, and
answers with what a reward function returns: a number, or an object with `score` and more numbers.
Promises: a server that is slow, broken or gone leaves samples unscored, by name, and never 0; a
request that failed on the way, or was answered 429 or 5xx, is repeated with growing pauses within
the sample's deadline (`rl.reward.timeout_s`). At most `rl.reward.num_workers` requests are
under way at once, by default one for each core and at most 16: a server that takes one needs 1.
Does not promise: one request a sample, so the server's answer may not depend on their number.
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
    """Ask the server.

    Args:
        data_source: of the row.
        solution_str: the completion.
        ground_truth: of the row.
        extra_info: of the row.
        url: that takes the POST.
        token_variable: environment variable with a bearer token; `rl.reward.environment` has to
            name it too.
        max_num_retries: after the first try.
        backoff_s: pause before the first repetition; each further one is twice as long.
        connect_timeout_s: for a connection to stand.

    Returns:
        What the server answered.

    Raises:
        ValueError: the token is not set, or the answer is no JSON, or too long.
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
    host = httpx2.URL(url).host
    raise ConnectionError(f"the reward server at {host}: {problem} (try {attempt + 1})")


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
    """One for all samples of a process, so that the connection stays open."""
    # Only connecting has a deadline of its own: the sample's ends the process.
    timeout = httpx2.Timeout(None, connect=connect_timeout_s)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx2.Client(timeout=timeout, headers=headers, trust_env=False)
