"""Answers that are lost or never come; `tests/e2e/test_ray_jobs.py` has a real head."""

import http.client
import socket
from typing import Any

import pytest

from infra.ray import jobs
from infra.ray.api import JobRequest, RayApi, RayResponseError, RayUnreachableError
from infra.ray.cluster import Cluster
from infra.ray.jobs import RayJobs

TAKEN = RayResponseError("POST /api/jobs/", 500, "ValueError: job a-0 already exists")
LOST = RayUnreachableError("the connection was closed")


class Api(RayApi):
    """Answers in turn."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = iter(answers)

    def call(self, *arguments: Any, **options: Any) -> Any:
        answer = next(self._answers)
        if answer is not None:
            raise answer


@pytest.mark.parametrize(
    ("answers", "is_ours"),
    [([None], True), ([TAKEN], False), ([LOST, TAKEN], True), ([LOST, LOST, None], True)],
)
def test_fault_row_19_arrived_submission_is_ours_without_answer(
    answers: list[Exception | None], is_ours: bool
) -> None:
    cluster = Cluster("http://127.0.0.1:1", None, started=False, home=None, api=Api(*answers))
    assert RayJobs(cluster).submit("a-0", JobRequest(["true"], {}, {})) is is_ours


def test_a_head_that_never_answers_holds_a_look_up_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when its host has gone: a watcher that waits for it hears no beats meanwhile."""
    assert jobs.LOOK_DEADLINE_S <= 5
    monkeypatch.setattr(jobs, "LOOK_DEADLINE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        cluster = Cluster(url, None, started=False, home=None, api=RayApi(url, None))
        connect, waits_s = http.client.HTTPConnection, list[float]()

        def connection(*arguments: Any, timeout: float, **options: Any) -> Any:
            waits_s.append(timeout)
            return connect(*arguments, timeout=timeout, **options)

        monkeypatch.setattr(http.client, "HTTPConnection", connection)
        with pytest.raises(RayUnreachableError):
            RayJobs(cluster).look("a-0")
    assert waits_s == [0.3]
