"""A Prefect server for tests that run a flow in their own process.

Prefect's own `prefect_test_harness` gives a starting server 5 s to answer its first request. A
busy machine takes longer. The server of `rlhf run` is waited for as long as runs wait for it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.local.embedded_prefect import embedded_prefect

DRAIN_DEADLINE_S = 60.0


@contextlib.contextmanager
def prefect_api(home: Path) -> Iterator[str]:
    """Record the flow runs of this process at a server of their own.

    Args:
        home: the server's database, record and log are below it.

    Yields:
        str: the server's API address.
    """
    with embedded_prefect(home) as server:
        server.wait()
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            try:
                yield server.api_url
            finally:
                for worker in (APILogWorker, EventsWorker):
                    worker.drain_all(timeout=DRAIN_DEADLINE_S)
