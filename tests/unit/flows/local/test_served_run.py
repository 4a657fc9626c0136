"""What ended a run in a worker is told as if it had run in the command's process."""

import asyncio

import pytest
from prefect.states import Cancelled, Crashed, exception_to_failed_state

from flows.local.served_run import FAILED, failure_of
from infra.errors import ConfigError, JobFailedError, PipelineError, UnknownPluginError


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
