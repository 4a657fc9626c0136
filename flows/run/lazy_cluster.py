"""A Ray cluster that starts when it is first needed, or a little earlier in the background."""

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
    """One cluster for one pipeline run.

    Args:
        home: where a cluster of our own keeps its files.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._starting: Future[Cluster] | None = None

    def jobs(self) -> RayJobs:
        """The job client of the running cluster; starts the cluster if nobody did.

        Returns:
            The client.

        Raises:
            ServiceError: the cluster could not be started.
            DeadlineError: it did not start in time.
        """
        return RayJobs(_result(self.start()))

    def release(self, besides: Collection[str] = ()) -> None:
        """End the cluster if nobody else uses it and no job runs on it; twice is as good as once.

        A start that is under way is given up.

        Args:
            besides: names of jobs that do not keep it.
        """
        if self._starting is None:
            return
        self._given_up.set()
        try:
            _result(self._starting).release(besides)
        except (PipelineError, OSError) as error:
            # Whoever needed it was told. If its end failed, its guard tries again.
            _log.debug("the cluster was not released: %s", error)

    def start(self) -> Future[Cluster]:
        """Begin to start it, if nobody did; returns at once."""
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
