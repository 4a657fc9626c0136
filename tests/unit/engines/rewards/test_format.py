"""Form and length, by tables worked out by hand."""

import pytest

from engines.config.algorithm import RewardConfig
from engines.config.options import check_reward
from engines.rewards.base import SampledTokens, ScoreRequest
from engines.rewards.text_rules import length, required_form
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na</think>\n\n<answer> b </answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer></think>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, value: float) -> None:
    assert required_form("d", text, None) == value


def test_a_pattern_is_matched_by_all_of_it() -> None:
    assert required_form("d", "a\nb: 5", None, pattern=r".*: \d+") == 1.0
    assert required_form("d", "a: 5 eggs", None, pattern=r".*: \d+") == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "linear", "cosine"),
    [(0, 1.0, 1.0), (4, 1.0, 1.0), (6, 0.75, 0.8535534), (8, 0.5, 0.5), (12, 0, 0), (99, 0, 0)],
)
def test_lengths(num_tokens: int, linear: float, cosine: float) -> None:
    """Free 4, limit 12: 6 tokens are a quarter of the way, (1 + cos 45 degrees) / 2."""
    ids = tuple(range(num_tokens))
    sample = ScoreRequest("d", "", "", tokens=SampledTokens((), ids, (0.0,) * num_tokens, "stop"))
    assert length(sample, max_tokens=12, free_tokens=4) == linear
    found = length(sample, max_tokens=12, free_tokens=4, shape="cosine")
    assert found == pytest.approx(cosine)


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        ("format", {"pattern": "("}, r"kwargs.pattern: got '\('; need a regular expression"),
        ("length", {}, "kwargs.max_tokens"),
        ("length", {"max_tokens": 4, "free_tokens": 4}, "free_tokens: got 4; need less than"),
    ],
)
def test_bad_options_are_refused_by_the_plan(function: str, kwargs: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_reward(RewardConfig(function=function, kwargs=kwargs))
