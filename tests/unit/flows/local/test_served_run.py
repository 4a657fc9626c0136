"""What ended a run in a worker is told as if it had run in the command's process."""

import asyncio
from io import StringIO
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.states import Cancelled, Crashed, exception_to_failed_state
from rich.console import Console

from flows.local.local_run import FAILED, failure_of, find_or_hint
from infra.errors import ConfigError, JobFailedError, PipelineError, UnknownPluginError
from infra.services.stack import WORK_POOL
from tests.unit.flows.prefect_api import prefect_api


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("rl.group_size", "got 1; need: more; set it"),
        UnknownPluginError("rl.reward", "got 'x'; need one of a, b"),
    ],
)
def test_a_mistake_of_the_user_is_one_with_its_path(error: ConfigError) -> None:
    state = asyncio.run(exception_to_failed_state(error, message=FAILED.strip()))
    told = failure_of(state)
    assert isinstance(told, ConfigError)
    assert (str(told), told.path) == (str(error), error.path)


def test_any_other_error_keeps_its_text_with_all_lines() -> None:
    error = JobFailedError("sft: job a1 failed\nits: log")
    told = failure_of(asyncio.run(exception_to_failed_state(error, message=FAILED.strip())))
    assert not isinstance(told, ConfigError)
    assert str(told) == str(error)


@pytest.mark.parametrize("state", [Cancelled(message="by hand"), Crashed(message="killed")])
def test_an_end_without_an_error_is_told_by_its_state(state) -> None:
    told = failure_of(state)
    assert type(told) is PipelineError
    assert str(told) == f"{state.name}: {state.message}"


@pytest.mark.slow
def test_a_server_without_our_deployment_is_told_how_to_get_it(tmp_path: Path) -> None:
    said = StringIO()
    console = Console(file=said, width=500)
    with (
        prefect_api(tmp_path),
        get_client(sync_client=True) as client,
    ):
        assert find_or_hint(console, tmp_path) is None
        hint = said.getvalue()
        assert hint == (
            "no deployment of this checkout at the server: the run is in this process, and its "
            f"page has no Retry; `PREFECT_API_URL={str(client.api_url).rstrip('/')} prefect "
            f"--no-prompt deploy --all` in {tmp_path} registers one\n"
        )
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        flow_id = client.create_flow_from_name("rlhf-pipeline")
        step = {"prefect.deployments.steps.set_working_directory": {"directory": str(tmp_path)}}
        made = client.create_deployment(
            flow_id, "rlhf-pipeline", pull_steps=[step], work_pool_name=WORK_POOL
        )
        assert find_or_hint(console, tmp_path) == made
        assert said.getvalue() == hint, "nothing more is said"
        assert find_or_hint(console, tmp_path / "other") is None
