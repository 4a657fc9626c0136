"""Nightly flow: recompute a matrix of recipes and compare the results with stored baselines.

rlhf nightly                              this file, in this process
prefect deployment run nightly-recipes    this file, in a worker; its schedule is in prefect.yaml
"""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.flows import Flow

from flows.nightly import night as nights
from flows.nightly.measurement import Measurement, measure, read_baseline
from flows.nightly.night import Night, Outcome, judge
from flows.nightly.page import show_night, write_night
from flows.preflight import preflight
from flows.recipe.recipe import Recipe
from flows.rlhf_pipeline import rlhf_pipeline, stop_jobs
from infra import env
from infra.errors import PipelineError
from infra.redact import redact

MATRIX = (
    "quickstart", "ppo", "grpo", "dr_grpo", "dapo", "vapo", "gspo", "rloo", "reinforce_plus_plus",
    "remax", "pf_ppo", "lora_grpo",
)  # fmt: skip
"""Recipes that take minutes on two cores."""
EVENTS = {"pass": "passed", "drift": "drifted", "fail": "failed"}
"""Ends of the names of the events that automations listen to, by verdict."""


class NotReproducedError(PipelineError):
    """At least one recipe failed; the others were computed nevertheless."""


def _on_cancellation(flow: Flow[..., None], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001  (Prefect's signature)
    """Stop the jobs of a cancelled night, whichever recipe is running."""
    below = FlowRunFilterParentFlowRunId(any_=[flow_run.id])
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=below))
    for child in children:
        stop_jobs(rlhf_pipeline, child, state)


@flow(name="nightly-recipes", on_cancellation=[_on_cancellation], log_prints=False)
def nightly_recipes(
    recipes: list[str] = list(MATRIX),  # noqa: B006  never changed, and the UI's form shows it
    baselines: str = str(nights.BASELINES),
) -> None:
    """Compute recipes anew, and judge each against its baseline.

    Args:
        recipes: shipped names, or YAML files.
        baselines: directory of the stored measurements.

    Raises:
        NotReproducedError: a recipe failed; the results are in the night's directory.
    """
    matrix = nights.load_matrix(recipes)
    stored = {each.name: read_baseline(Path(baselines), each.name) for each in matrix}
    directory = nights.open_night(env.home(), _name())
    night = Night(name=directory.name, outcomes=())
    for recipe in matrix:
        measurement = _compute(nights.afresh(recipe, directory), night.name)
        verdict = judge(stored[recipe.name], measurement)
        outcome = Outcome(measurement=measurement, verdict=verdict)
        night = night.model_copy(update={"outcomes": (*night.outcomes, outcome)})
        nights.keep_night(directory, night)
        resource = {
            "prefect.resource.id": f"rlhf.nightly.{verdict.recipe}",
            "prefect.resource.name": verdict.recipe,
        }
        emit_event(f"rlhf.nightly.{EVENTS[verdict.word]}", resource, payload=verdict.model_dump())
    write_night(night, stored, directory)
    show_night(night, stored, directory)
    if night.failed:
        raise NotReproducedError(f"not reproduced: {', '.join(night.failed)}")


def _compute(recipe: Recipe, night: str) -> Measurement:
    try:
        recipe = preflight(recipe)
        rlhf_pipeline(recipe)
    except (PipelineError, OSError) as error:  # other recipes may still succeed
        return measure(recipe, night, redact(" ".join(str(error).split())))
    return measure(recipe, night)


def _name() -> str:
    """Return the night's name: creation time and part of the flow run's id; a retry keeps it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.created is None:
        raise RuntimeError("a night is a flow run; call nightly_recipes()")
    return f"{context.flow_run.created:%Y%m%dT%H%M%S}-{str(context.flow_run.id)[:8]}"
