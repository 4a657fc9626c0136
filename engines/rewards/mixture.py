"""Reward `mixture`: a weighted sum of other rewards, chosen by the row's `data_source`.

Promises: each component is called as it would be alone. A sample that one component leaves unscored
is unscored, since a partial sum is another reward. The deadline is per sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from engines.config.algorithm import RewardConfig
from engines.rewards.answers.extraction import ANSWER
from engines.rewards.base import Form, Score, ScoreRequest, form_of, judge
from engines.rewards.resolve import load
from infra.errors import ConfigError

OTHERS = "*"
"""`data_source` of the route for every value without a route of its own."""


def score(
    sample: ScoreRequest,
    *,
    components: Mapping[str, Mapping[str, Any]],
    routes: Mapping[str, Sequence[str]],
    accuracy: Sequence[str],
) -> dict[str, Any]:
    """Return `score`, the sum; each component's score by its name; `acc`; and `pred` if given.

    Args:
        components: by name: `target` (see `resolve.load`), `kwargs` and `weight`.
        routes: component names by `data_source`; if empty, all components judge every sample.
        accuracy: components that decide `acc` and `pred`: their `acc`, or a score >= 1.

    Raises:
        ValueError: the row has no route, or a component gives no score.
    """
    found: dict[str, Score] = {}
    for name in route_of(sample.data_source, routes, tuple(components)):
        function, form = _function(components[name]["target"])
        judged = judge(function, form, sample, components[name]["kwargs"])
        if not isinstance(judged, Score):
            raise ValueError(f"component {name} {judged.reason}")
        found[name] = judged
    total = sum(components[name]["weight"] * each.value for name, each in found.items())
    [judge_of_answers] = [name for name in found if name in accuracy]
    own = {name: each.value for name, each in found.items()}
    answer = found[judge_of_answers].answer
    said = {} if answer is None else {ANSWER: answer}
    return {**own, **said, "score": total, "acc": _verdict(found[judge_of_answers])}


def route_of(
    data_source: str, routes: Mapping[str, Sequence[str]], components: Sequence[str]
) -> Sequence[str]:
    """Return the components for a `data_source`; ValueError if routes exist, but none for it."""
    if not routes:
        return components
    names = routes.get(data_source, routes.get(OTHERS))
    if names is None:
        raise ValueError(f"no route for data_source {data_source!r}; routes: {', '.join(routes)}")
    return names


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Raise ConfigError that names the first row without a route."""
    for row, data_source in enumerate(data_sources):
        try:
            route_of(data_source, config.routes, tuple(config.components))
        except ValueError as error:
            raise ConfigError(
                "rl.reward.routes", f"row {row}: {error}; add it, or a route named {OTHERS!r}"
            ) from None


@lru_cache(maxsize=64)
def _function(target: str) -> tuple[Callable[..., Any], Form]:
    function = load(target)
    return function, form_of(function)


def _verdict(judged: Score) -> float:
    acc = judged.extras.get("acc")
    return float(judged.value >= 1 if acc is None else acc >= 0.5)  # noqa: PLR2004  a share
