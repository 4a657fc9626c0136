"""Followers in processes of their own that want one stage at the same moment, round after round."""

import multiprocessing
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import Self

from engines.config.stages.base import Runtime
from infra.ray.cluster import Cluster
from infra.ray.jobs import RayJobs
from infra.store.storage import open_storage
from tasks.runner.following import JobFollower
from tasks.runner.recorder import RunPage
from tasks.runner.run import StageRequest
from tasks.runner.submission import Submission

ROUND_DEADLINE_S = 120.0


class Followers:
    """Processes that follow what they are told to.

    Args:
        homes: the cluster as each home sees it; the followers take turns.
        store_uri: of all.
        num_followers: how many.
    """

    def __init__(self, homes: Sequence[Cluster], store_uri: str, num_followers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([JobFollower.__module__])  # one import for all of them
        # Kept: its semaphores end with their first owner.
        self._barrier = context.Barrier(num_followers)
        self._ends: list[Connection] = []
        self._processes = []
        for index in range(num_followers):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._barrier, homes[index % len(homes)], store_uri)
            self._ends.append(ours)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def want(self, request: StageRequest) -> list[str]:
        """What each of them gets to know of the stage's commit."""
        for end in self._ends:
            end.send(request)
        answers = []
        for end in self._ends:
            assert end.poll(ROUND_DEADLINE_S), f"a follower of {request.fingerprint} is silent"
            answers.append(end.recv())
        return answers


def new_follower(request: StageRequest, store_uri: str, runtime: Runtime) -> JobFollower:
    """A follower of a stage that keeps to itself what it sees."""
    store, name = open_storage(store_uri), uuid.uuid4().hex
    return JobFollower(
        Submission(
            request=request,
            storage=store,
            runtime=runtime,
            metadata={},
            follower=name,
            run_key="a" * 64,
        ),
        force="",
        page=RunPage(request.label),
        say=lambda text: None,
        on_stand=lambda log: None,
    )


def _serve(end: Connection, barrier: Barrier, cluster: Cluster, store_uri: str) -> None:
    while True:
        request: StageRequest = end.recv()
        follower = new_follower(request, store_uri, Runtime())
        barrier.wait(ROUND_DEADLINE_S)
        try:
            record = follower.follow(RayJobs(cluster), lambda record: None)
            end.send(record.model_dump_json())
        except Exception as error:  # noqa: BLE001  the process boundary
            end.send(f"{type(error).__name__}: {error}")
