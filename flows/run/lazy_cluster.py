"""A Ray cluster that starts when it is first needed, or a little earlier in the background."""

import logging
import threading
from concurrent.futures import Future
from pathlib import Path

from infra import env
from infra.errors import DeadlineError, PipelineError
from infra.host.processes import is_alive
from infra.host.records import load_record
from infra.ray.cluster import Cluster, ensure_cluster
from infra.ray.embedded import RayRecord, open_api, record_path
from infra.ray.jobs import RayJobs

START_DEADLINE_S = 180.0

_log = logging.getLogger(__name__)


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
        self._start()

    def jobs(self) -> RayJobs:
        """The job client of the running cluster; starts the cluster if nobody did.

        Returns:
            The client.

        Raises:
            ServiceError: the cluster could not be started.
            DeadlineError: it did not start in time.
        """
        return RayJobs(_result(self._start()))

    def release(self, *, keep_running_jobs: bool = False) -> None:
        """End the cluster if nobody else uses it; one that was never needed is no work.

        Args:
            keep_running_jobs: a job that runs keeps it alive, for the next run to attach to.
        """
        if self._starting is None:
            return
        try:
            cluster = _result(self._starting)
        except PipelineError as error:
            # Whoever needed it was told; here it only means that there is nothing to end.
            _log.debug("no cluster to release: %s", error)
            return
        cluster.release(keep_running_jobs=keep_running_jobs)

    def _start(self) -> Future[Cluster]:
        with self._lock:
            if self._starting is None:
                self._starting = Future()
                threading.Thread(
                    target=_run, args=(self._home, self._starting), name="ray-start", daemon=True
                ).start()
            return self._starting


def _run(home: Path, starting: Future[Cluster]) -> None:
    try:
        starting.set_result(ensure_cluster(home))
    except BaseException as error:  # noqa: BLE001  handed to the thread that waits
        starting.set_exception(error)


def _result(starting: Future[Cluster]) -> Cluster:
    try:
        return starting.result(timeout=START_DEADLINE_S)
    except TimeoutError:
        raise DeadlineError("the Ray cluster to start", START_DEADLINE_S) from None


def living_cluster(home: Path) -> Cluster | None:
    """The cluster that a run of this home would find now; starts none.

    Args:
        home: of the run.

    Returns:
        The cluster, or None.
    """
    if env.RAY_ADDRESS.get():
        return ensure_cluster(home)
    record = load_record(record_path(home), RayRecord)
    if record is None or not is_alive(record.process):
        return None
    return Cluster(record.jobs_url, record.gcs_address, False, home, open_api(record))
