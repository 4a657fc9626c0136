"""Sums of rewards by `data_source`, through real scoring processes."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards.base import SampledTokens, Score, ScoreRequest, Unscored
from engines.rewards.resolve import check_data_sources, resolve
from engines.rewards.scorer import RewardScorer
from infra.errors import ConfigError, UnknownPluginError

OWN = """
import asyncio

def half(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": 1.0}

async def tokens(sample, scale):
    await asyncio.sleep(0)
    return scale * len(sample.tokens.token_ids)

def broken(data_source, solution_str, ground_truth, extra_info=None):
    return None if solution_str == "7" else 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def ask(solution: str, truth: str = "42", data_source: str = "a") -> ScoreRequest:
    tokens = SampledTokens((1,), tuple(solution.encode()), (-1.0,) * len(solution), "stop")
    return ScoreRequest(data_source, solution, truth, tokens=tokens)


def config(own: Path, **changes: Any) -> RewardConfig:
    return RewardConfig.model_validate(
        {
            "function": "mixture",
            "components": {
                "right": {"function": "exact", "weight": 2.0},
                "short": {"function": f"{own}:tokens", "kwargs": {"scale": -1.0}, "weight": 0.1},
            },
            "accuracy": ["right"],
            "max_unscored_frac": 1.0,
            **changes,
        }
    )


def test_by_hand(own: Path) -> None:
    """2 x 1 - 0.1 x 2 tokens = 1.8; a wrong one of three: 2 x 0 - 0.1 x 3 = -0.3."""
    with RewardScorer(config(own)) as scorer:
        right, wrong = scorer.score([ask("42"), ask("420")])
    assert right == Score(pytest.approx(1.8), {"right": 1.0, "short": -2.0, "acc": 1.0})
    assert wrong == Score(pytest.approx(-0.3), {"right": 0.0, "short": -3.0, "acc": 0.0})
    assert (right.answer, wrong.answer) == ("42", "420"), "read by the component that decides"


def test_rows_are_judged_by_their_route(own: Path) -> None:
    components = {"exact": {}, "half": {"function": f"{own}:half", "weight": 4.0}}
    routes = {"a": ["exact"], "*": ["half"]}
    mixed = config(own, components=components, routes=routes, accuracy=["exact", "half"])
    with RewardScorer(mixed) as scorer:
        of_a, of_b = scorer.score([ask("41"), ask("41", data_source="b")])
    assert of_a == Score(0.0, {"exact": 0.0, "acc": 0.0})
    # What a component says of its answer decides, not the size of its score.
    assert of_b == Score(2.0, {"half": 0.5, "acc": 1.0})


def test_without_one_component_there_is_no_sum(own: Path) -> None:
    components = {"exact": {}, "own": {"function": f"{own}:broken"}}
    with RewardScorer(config(own, components=components, accuracy=["exact"])) as scorer:
        unscored, scored = scorer.score([ask("7"), ask("42")])
    assert unscored == Unscored("raised ValueError: component own returned None; need a number")
    assert scored == Score(2.0, {"exact": 1.0, "own": 1.0, "acc": 1.0})


def test_rows_without_a_reward_route_are_refused_early(own: Path) -> None:
    mixed = config(own, routes={"a": ["right"]})
    check_data_sources(mixed, ["a", "a"])
    with pytest.raises(ConfigError) as caught:
        check_data_sources(mixed, ["a", "b"])
    assert str(caught.value) == (
        "rl.reward.routes: row 1: no route for data_source 'b'; routes: a; add it, or a route "
        "named '*'"
    )
    check_data_sources(RewardConfig(), ["anything"])
    strict = config(own, routes={"a": ["right"]}, max_unscored_frac=0.0)
    with (
        RewardScorer(strict) as scorer,
        pytest.raises(RewardError, match="no route for data_source 'b'"),
    ):
        scorer.score([ask("42", data_source="b")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"components": {}}, "components: got 0 with function mixture"),
        ({"function": "exact"}, "components: got 2 with function exact"),
        ({"routes": {"a": ["wrong"]}}, "none is called 'wrong'; need one of right, short"),
        ({"accuracy": ["nobody"]}, "none is called 'nobody'"),
        ({"accuracy": []}, "accuracy: got none; need one of right, short, which judge"),
        ({"routes": {"a": ["short"]}}, "accuracy: got right; need one of short, which judge"),
        ({"routes": {"a": []}}, "accuracy: got right; need one of the components"),
        (
            {"components": {"acc": {"function": "exact"}}, "accuracy": ["acc"]},
            "components: got one called acc, which names the sum or the verdict",
        ),
    ],
)
def test_what_does_not_fit_is_refused(own: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(own, **changes)


def test_a_component_is_checked_as_a_reward_is(own: Path) -> None:
    unknown = config(own, components={"x": {"function": "exakt"}}, accuracy=["x"])
    with pytest.raises(UnknownPluginError, match=r"reward\.components\.x\.function: no 'exakt'"):
        resolve(unknown)
    option = {"x": {"function": "exact", "kwargs": {"ignorecase": True}}}
    with pytest.raises(ConfigError, match=r"rl\.reward\.components\.x\.kwargs\.ignorecase"):
        resolve(config(own, components=option, accuracy=["x"]))
    absent = {"x": {"function": f"{own}:nothing"}}
    with pytest.raises(ConfigError, match="does not define 'nothing'"):
        resolve(config(own, components=absent, accuracy=["x"]))


def test_the_memory_limit_is_the_largest_of_our_own_components(own: Path) -> None:
    both = {"exact": {}, "math": {"function": "math"}}
    limited = resolve(config(own, components=both, accuracy=["math"]))
    assert limited.function.memory_limit_bytes == 4 * 2**30
    with_file = {**both, "own": {"function": f"{own}:half"}}
    free = resolve(config(own, components=with_file, accuracy=["math"]))
    assert free.function.memory_limit_bytes is None
