"""Reward `mixture`: a weighted sum of other rewards, chosen by the row's `data_source`.

Promises: each component has the form, the arguments and the meaning that it has alone; its score is
reported under its name; a sample that a component leaves unscored is unscored, for a sum without
it would be another reward.
Does not promise deadlines of single components: one deadline holds for the sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from engines.config.algorithm import RewardConfig
from engines.rewards.answers.extraction import ANSWER
from engines.rewards.base import Score, ScoreRequest
from engines.rewards.forms import Form, form_of, judge
from engines.rewards.resolve import load
from infra.errors import ConfigError

OTHERS = "*"
"""The `data_source` of a route that stands for every one without a route of its own."""


def score(
    sample: ScoreRequest,
    *,
    components: Mapping[str, Mapping[str, Any]],
    routes: Mapping[str, Sequence[str]],
    accuracy: Sequence[str],
) -> dict[str, Any]:
    """Judge a sample by every component on its route.

    Args:
        sample: what was sampled.
        components: by name: `target` as of `resolve.load`, `kwargs` and `weight`.
        routes: names of components by `data_source`; none: all judge all.
        accuracy: the components whose verdict is `acc`: what they report as that, or a score >= 1.

    Returns:
        `score`, the sum; each component's own by its name; `acc`; `pred` where the component whose
        verdict is `acc` says what it read.

    Raises:
        ValueError: the row has no route, or a component has no score.
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
    """The components that judge the rows of a `data_source`.

    Args:
        data_source: of the row.
        routes: as of `score`.
        components: names of all.

    Returns:
        Their names.

    Raises:
        ValueError: there are routes, and none for it.
    """
    if not routes:
        return components
    names = routes.get(data_source, routes.get(OTHERS))
    if names is None:
        raise ValueError(f"no route for data_source {data_source!r}; routes: {', '.join(routes)}")
    return names


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Refuse rows that no component would judge.

    Args:
        config: the reward.
        data_sources: of the rows, in their order.

    Raises:
        ConfigError: names the first row without a route.
    """
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
