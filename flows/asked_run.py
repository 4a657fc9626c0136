"""A run that somebody asks for: what is looked at before anything is started for it.

Promises: a stage that the recipe has not got, that has nothing to adopt, or that cannot be started
from because one before it is not done, is one line here, and nothing was started.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from flows.plan import Planner
from flows.recipe.recipe import Recipe
from flows.run.registry import Registry
from flows.run.round_gate import RoundGate
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.names import unknown_name
from infra.store.storage import open_storage
from infra.tracking.history import StageHistory


def plan_run(
    recipe: Recipe,
    force: Mapping[str, str],
    adopt: Collection[str] = (),
    start_from: str | None = None,
) -> Planner:
    """Look every stage of a recipe up.

    Args:
        recipe: whose stages.
        force: by stage label, a token that makes the stage run anew.
        adopt: labels of stages that continue half-trained work of another fingerprint.
        start_from: label of a stage before which everything has to be done; None: of none.

    Returns:
        The plan.

    Raises:
        ConfigError: the recipe has no stage of such a label, one has nothing to adopt, or one
            before `start_from` is not done.
    """
    storage = open_storage(recipe.store_uri)
    planner, registry = Planner(storage, recipe.seed, force, adopt), Registry(recipe, storage)
    # A model that is likely to be the champion again is no rival of itself.
    gate = RoundGate(recipe.diagnosis, StageHistory(storage), planner.reject)
    run_stages(
        recipe,
        planner,
        lambda model: registry.incumbent(planner.likely(model)),
        gate.accepts,
    )
    labels = [stage.label for stage in planner.stages]
    started = [] if start_from is None else [start_from]
    for option, named in (("--from", started), ("--force", force), ("--adopt", adopt)):
        for label in named:
            if label not in labels:
                raise ConfigError(option, unknown_name(label, labels))
    for stage in planner.stages[: labels.index(start_from) if start_from else 0]:
        if stage.status != "hit":
            raise ConfigError(
                "--from",
                f"got {start_from!r}; need every stage before it done, and {stage.label} is not; "
                f"run --from {stage.label}, or without --from",
            )
    return planner


@dataclass(frozen=True)
class AskedRun:
    """A run that somebody asks for, and that a look found nothing against.

    Attributes:
        recipe: what to run.
        force: by label of a stage to run again, the token that asks for it.
        adopt: labels of stages.
        start_from: label of the stage before which everything is done, if one was named.
        is_done: whether every stage would be reused.
    """

    recipe: Recipe
    force: dict[str, str]
    adopt: list[str]
    start_from: str | None
    is_done: bool


def ask(
    recipe: Recipe, force: Collection[str], adopt: Collection[str], start_from: str | None
) -> AskedRun:
    """Ask for a run, before anything is started for it.

    Args:
        recipe: as of `plan_run`, as are all others.
        force: labels of stages to run again.
        adopt: labels of stages.
        start_from: label of a stage.

    Returns:
        The run.

    Raises:
        ConfigError: of `plan_run`.
    """
    # A new token for every run: the same one would find the stage committed under it.
    token = datetime.now(UTC).isoformat(timespec="microseconds")
    tokens = dict.fromkeys(filter(None, (*force, start_from)), token)
    planner = plan_run(recipe, tokens, adopt, start_from)
    return AskedRun(recipe, tokens, [*adopt], start_from, planner.all_hit)
