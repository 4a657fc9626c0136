"""A Ray cluster that starts when it is first needed, or a little earlier in the background."""

import threading
from concurrent.futures import Future
from pathlib import Path

from infra import env
from infra.errors import DeadlineError
from infra.ray_cluster import Cluster, ensure_cluster
from infra.ray_jobs import RayJobs

START_DEADLINE_S = 180.0


class LazyCluster:
    """One cluster for one pipeline run.

    Args:
        home: where a cluster of our own keeps its files.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._starting: Future[Cluster] | None = None

    def start_in_background(self) -> None:
        """Begin to start it; returns at once."""
        with self._lock:
            if self._starting is None:
                self._starting = Future()
                threading.Thread(target=self._start, name="ray-start", daemon=True).start()

    def jobs(self) -> RayJobs:
        """The job client of the running cluster.

        Raises:
            DeadlineError: the cluster did not start in time.
        """
        self.start_in_background()
        assert self._starting is not None
        try:
            return RayJobs(self._starting.result(timeout=START_DEADLINE_S))
        except TimeoutError:
            raise DeadlineError("the Ray cluster to start", START_DEADLINE_S) from None

    def release(self) -> None:
        """End the cluster if this run started it; a cluster that was never needed is no work."""
        if self._starting is None:
            return
        try:
            self._starting.result(timeout=START_DEADLINE_S).release()
        except TimeoutError:
            raise DeadlineError("the Ray cluster to start", START_DEADLINE_S) from None

    def _start(self) -> None:
        assert self._starting is not None
        try:
            self._starting.set_result(ensure_cluster(self._home, env.RAY_ADDRESS.get()))
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            self._starting.set_exception(error)
