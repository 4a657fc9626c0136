"""The whole pipeline as a Prefect flow; `flows.stage_order` has the order of its stages.

rlhf run quickstart                       this file, in this process
prefect deployment run rlhf-pipeline      this file, in a worker
"""

import logging
from pathlib import Path

from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.plan import plan_run
from flows.preflight import preflight
from flows.recipe.recipe import Recipe, load_recipe, prepare_recipe
from flows.report.report import Report
from flows.run.pipeline_run import is_watched, open_run
from flows.stage_order import run_stages
from infra import env
from infra.errors import PipelineError
from infra.plugins import import_external_modules
from infra.ray.cluster import living_cluster
from infra.ray.jobs import RayJobs
from infra.store.storage import open_storage
from tasks.runner.submission import stop_followed


def stop_jobs(flow: Flow[..., Report], flow_run: FlowRun, state: State[Report]) -> None:  # noqa: ARG001  (Prefect's signature)
    """Stop the jobs of a cancelled run, in case its own process could not."""
    location = flow_run.parameters.get("recipe", {}).get("location", {})
    home = Path(location["home"]) if location.get("home") else env.home()
    try:
        if cluster := living_cluster(home):
            storage = open_storage(location.get("store") or str(home / "store"))
            stop_followed(storage, RayJobs(cluster), str(flow_run.id))
    except PipelineError as error:
        logger = logging.getLogger(__name__)
        logger.warning("jobs of flow run %s may still run: %s", flow_run.id, error)


@flow(
    name="rlhf-pipeline",
    flow_run_name="{recipe.name}-seed{recipe.seed}",
    on_cancellation=[stop_jobs],
    persist_result=True,
    result_serializer="json",
    log_prints=False,
)
def rlhf_pipeline(
    recipe: Recipe = load_recipe("quickstart"),  # noqa: B008  frozen, and the UI's form shows it
    force: dict[str, str] | None = None,
    adopt: list[str] | None = None,
    start_from: str | None = None,
) -> Report:
    """Run the pipeline from raw data to a promoted model.

    Args:
        recipe: the whole configuration; the form is filled with the quickstart.
        force: finished stages to run again (`rl_round_2`), each with any new text.
        adopt: stages that continue half-trained work from before an edit or a change of layout.
        start_from: a finished stage that runs again; all stages before it have to be done.
    """
    for broken in import_external_modules():
        get_run_logger().warning("%s", broken)
    tokens = dict(force or {})
    if start_from is not None:  # a retry has the same id, so it reuses what is done
        tokens.setdefault(start_from, str(flow_run.id))
    if not is_watched():  # else the command has prepared the recipe
        recipe = preflight(prepare_recipe(recipe), tokens)
        if tokens or adopt:
            plan_run(recipe, tokens, adopt or [], start_from)
    labels = {f"recipe:{recipe.name}", f"platform:{recipe.hardware.platform}"}
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(context.flow_run.id, tags={*context.flow_run.tags, *labels})
    with tags(*labels), open_run(recipe, tokens, adopt or []) as run:
        run_stages(recipe, run.stages, run.registry.incumbent, run.gate.accepts)
        return run.finish()
