"""Submissions whose answers are lost; `tests/e2e/test_ray_jobs.py` has the rest, on a real head."""

from typing import Any

import pytest

from infra.ray.api import RayApi, RayResponseError, RayUnreachableError
from infra.ray.cluster import Cluster
from infra.ray.job_types import JobRequest
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
def test_a_submission_that_arrived_is_ours_although_its_answer_was_lost(
    answers: list[Exception | None], is_ours: bool
) -> None:
    cluster = Cluster("http://127.0.0.1:1", None, started=False, home=None, api=Api(*answers))
    assert RayJobs(cluster).submit("a-0", JobRequest(["true"], {}, {})) is is_ours
