"""Scores that are kept."""

from collections.abc import Sequence
from pathlib import Path

from engines.config.algorithm import RewardConfig
from engines.rewards.base import Form, SampledTokens, Score, ScoreRequest, Unscored
from engines.rewards.scorer import CachedJudging, JudgingHere, RewardScorer, ScoreCache


def ask(solution: str, logprob: float = -1.0) -> ScoreRequest:
    return ScoreRequest("a", solution, "42", tokens=SampledTokens((1,), (2,), (logprob,), "stop"))


class Judge:
    """Scores by length, `None` for the empty text, and says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: ScoreRequest) -> Score | Unscored:
        self.asked.append(request.solution_str)
        if not request.solution_str:
            return Unscored("empty")
        return Score(float(len(request.solution_str)))


def score(
    cache: ScoreCache, requests: Sequence[ScoreRequest], form: Form, judge: Judge
) -> list[Score | Unscored]:
    batch = CachedJudging(cache, form, JudgingHere(judge))
    assert [batch.add(request) for request in requests] == list(range(len(requests)))
    return batch.results()


def test_equal_samples_are_judged_once_and_what_failed_again() -> None:
    cache, judge = ScoreCache(10), Judge()
    first = score(cache, [ask("a"), ask("bb"), ask("a", -2.0), ask("")], "text", judge)
    assert first == [Score(1.0), Score(2.0), Score(1.0), Unscored("empty")]
    assert score(cache, [ask(""), ask("bb")], "text", judge) == [Unscored("empty"), Score(2.0)]
    assert judge.asked == ["a", "bb", "", ""]


def test_a_function_that_sees_tokens_is_asked_for_other_tokens() -> None:
    cache, judge = ScoreCache(10), Judge()
    score(cache, [ask("a"), ask("a", -2.0), ask("a")], "sample", judge)
    assert judge.asked == ["a", "a"]


def test_the_least_recently_asked_for_is_forgotten() -> None:
    cache, judge = ScoreCache(2), Judge()
    for text in ("a", "bb", "a", "ccc", "a", "bb"):
        score(cache, [ask(text)], "text", judge)
    assert judge.asked == ["a", "bb", "ccc", "bb"]


def test_a_scorer_keeps_scores_over_steps(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    function = tmp_path / "own.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n"
        "        file.write(solution_str)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    config = RewardConfig(function=str(function), cache_size=8, num_workers=1)
    with RewardScorer(config) as scorer:
        # Which form the function has is known from the second step on.
        scorer.score([ask("x")])
        for _ in range(3):
            assert scorer.score([ask("42"), ask("y"), ask("42", -3.0)])[0] == Score(1.0)
    assert calls.read_text() == "x42y"
