"""How a stage function becomes a Prefect task: one place for names, caching and results.

The store's commit record decides what is reused, on any host and under any Prefect server, so
Prefect's own cache is off. A reused stage shows as `Reused` on the run page. Results are kept as
JSON, never pickled.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.runner.run import StageResult, StageRunner

Params = ParamSpec("Params")
StageFunction = Callable[Concatenate[StageRunner, Params], StageResult]


def stage_task(function: StageFunction[Params]) -> StageFunction[Params]:
    """Make a stage function a Prefect task wherever its runner is orchestrated by Prefect.

    The task has the function's name, and its run the label of its stage.

    Args:
        function: of a runner, a configuration `config` and input artifacts.

    Returns:
        A function of the same signature; with a runner that is not orchestrated (a plan, a test,
        a notebook) it calls the given one directly.
    """

    @wraps(function)
    def with_state(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not result.reused:
            return result
        message = f"{result.label} {result.fingerprint[:12]} was already committed"
        return Completed(name="Reused", message=message, data=result)

    prefect_task = task(
        name=function.__name__,
        task_run_name="{config.label}",
        cache_policy=NO_CACHE,
        persist_result=True,
        result_serializer="json",
    )(with_state)

    @wraps(function)
    def call(run: StageRunner, *args: Params.args, **kwargs: Params.kwargs) -> StageResult:
        if run.orchestrated:
            outcome: Any = prefect_task(run, *args, **kwargs)
            return cast(StageResult, outcome.result() if isinstance(outcome, State) else outcome)
        return function(run, *args, **kwargs)

    return call
