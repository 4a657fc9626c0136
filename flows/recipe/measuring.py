"""Rules of a recipe that trains nothing: it has something to measure, and no idle settings.

Promises: with suites alone, a section that would change nothing is refused, by the field and with
what to set instead. Does not promise that of a recipe with data of its own, which may be one that
trains with its training switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.config.base import StrictModel
from infra.errors import ConfigError

if TYPE_CHECKING:
    from flows.recipe.recipe import Recipe

OF_TASKS = "the tasks of a harness say how they are asked and judged; remove it"
NOT_TRAINED = "nothing is trained here; remove it"


def check_measuring(recipe: Recipe) -> None:
    """Check a recipe that trains nothing.

    Args:
        recipe: without training.

    Raises:
        ConfigError: no model or no problems to measure, or a setting that nothing reads.
    """
    if recipe.model.init == "random":
        raise ConfigError(
            "rl.num_rounds",
            "got 0 with sft: null; nothing would be trained; add one, or name a model to measure "
            "(model.path)",
        )
    if recipe.reward_model is not None:
        raise ConfigError(
            "reward_model", "got a section, and nothing is trained by it; remove it, or add rl"
        )
    if recipe.data is None and not recipe.suites:
        raise ConfigError("data", "missing, and there are no suites to measure; add one of them")
    if recipe.data is None:
        _check_suites_alone(recipe)


def _check_suites_alone(recipe: Recipe) -> None:
    """The suites say how they are answered and judged; the recipe's own sections do not."""
    some = next(iter(recipe.data_suites), None)
    why_evaluation = why_reward = OF_TASKS
    if some is not None:
        why_evaluation = (
            "the recipe has no data of its own, and this changes no suite; need it of a suite; set "
            f"suites.{some}.evaluation.{{}}"
        )
        why_reward = (
            "every suite has a reward of its own; need it of a suite; set "
            f"suites.{some}.reward.{{}}"
        )
    confidence = {"confidence"} if recipe.harness_suites else set[str]()
    _refuse("evaluation", recipe.evaluation, confidence, why_evaluation)
    if all(recipe.suites[name].reward for name in recipe.data_suites):
        _refuse("rl.reward", recipe.rl.reward, set(), why_reward)
    _refuse("rl.sampling", recipe.rl.sampling, {"max_new_tokens", "stop", "stop_token_ids"},
            NOT_TRAINED)  # fmt: skip
    _refuse("rl", recipe.rl, {"num_rounds", "sampling", "reward"}, NOT_TRAINED)
    for name in ("promote", "checkpoint", "merge"):
        _refuse(name, getattr(recipe, name), set(), NOT_TRAINED)


def _refuse(path: str, section: StrictModel, used: set[str], why: str) -> None:
    """Raise where a field that is not used has another value than its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in used and value != field.get_default(call_default_factory=True):
            shown = "other values" if isinstance(value, StrictModel) else repr(value)
            raise ConfigError(f"{path}.{name}", f"got {shown}; {why.format(name)}")
