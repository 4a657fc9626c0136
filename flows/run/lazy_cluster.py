"""A Ray cluster that starts on first use, or earlier in the background."""

import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path

from infra.errors import DeadlineError, PipelineError
from infra.host.servers import LOCK_DEADLINE_S
from infra.ray.cluster import Cluster, ensure_cluster
from infra.ray.jobs import RayJobs

_log = logging.getLogger(__name__)


class LazyCluster:
    """The cluster of one pipeline run; a local one keeps its files in `home`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._starting: Future[Cluster] | None = None

    def jobs(self) -> RayJobs:
        """Return the job client of the cluster; start the cluster if it is not running.

        Raises:
            ServiceError: the cluster could not be started.
            DeadlineError: it did not start in time.
        """
        return RayJobs(_result(self.start()))

    def release(self, besides: Collection[str] = ()) -> None:
        """End the cluster if it has no other user and no job; may be called twice.

        A start in progress is aborted. Jobs named in `besides` do not keep the cluster alive.
        """
        if self._starting is None:
            return
        self._given_up.set()
        try:
            _result(self._starting).release(besides)
        except (PipelineError, OSError) as error:
            # A failed start was reported to its user. A failed end is retried by the guard.
            _log.debug("the cluster was not released: %s", error)

    def start(self) -> Future[Cluster]:
        """Start the cluster in the background, if it is not running."""
        with self._lock:
            if self._starting is None:
                self._starting = Future()
                threading.Thread(
                    target=self._run, args=(self._starting,), name="ray-start", daemon=True
                ).start()
            return self._starting

    def _run(self, starting: Future[Cluster]) -> None:
        try:
            starting.set_result(ensure_cluster(self._home, given_up=self._given_up.is_set))
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            starting.set_exception(error)


def _result(starting: Future[Cluster]) -> Cluster:
    try:
        return starting.result(timeout=LOCK_DEADLINE_S)
    except TimeoutError:
        raise DeadlineError("the Ray cluster to start", LOCK_DEADLINE_S) from None
