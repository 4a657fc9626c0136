"""HTTP checks of servers on this machine."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def answers_ok(url: str) -> bool:
    """Return True if a GET of a plain HTTP address gives status 200."""
    return _exchange("GET", url) is not None


def online_workers(api_url: str, pool: str) -> int:
    """Return the number of online workers of a Prefect work pool; 0 if the server is silent."""
    answer = _exchange("POST", f"{api_url}/work_pools/{pool}/workers/filter", {})
    if answer is None:
        return 0
    return sum(1 for worker in json.loads(answer) if worker.get("status") == "ONLINE")


def _exchange(method: str, url: str, body: Any = None) -> bytes | None:
    """Return the content of a 200 answer; None for anything else, silence included."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT_S
    )
    try:
        connection.request(
            method,
            parts.path,
            body=None if body is None else json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        content = response.read()
        return content if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
