"""The scorer: simple where it can be, and loud when too much is unscored."""

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards import scorer as scorer_module
from engines.rewards import text_rules
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.scorer import RewardScorer, check_unscored
from engines.rewards.text_rules import exact


def test_exact_scores_in_this_process_with_one_call_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str]] = []

    def counted(data_source: str, solution_str: str, *arguments: Any, **kwargs: Any) -> Any:
        calls.append((data_source, solution_str))
        return exact(data_source, solution_str, *arguments, **kwargs)

    monkeypatch.setattr(text_rules, "exact", functools.wraps(exact)(counted))
    monkeypatch.setattr(subprocess, "Popen", None)
    requests = [ScoreRequest("arithmetic/add", str(i % 7), "3") for i in range(512)]
    with RewardScorer(RewardConfig(function="exact", cache_size=0)) as scorer:
        results = scorer.score(requests)
    assert results == [Score(float(i % 7 == 3)) for i in range(512)]
    assert calls == [(each.data_source, each.solution_str) for each in requests]


def test_exact_takes_the_delimiter_of_the_row() -> None:
    with RewardScorer(RewardConfig()) as scorer:
        rows = [ScoreRequest("d", "640;140", "140", {"answer_delimiter": ";"})]
        assert scorer.score(rows) == [Score(1.0)]


def test_an_error_in_this_process_is_unscored() -> None:
    requests = [ScoreRequest("d", "1", "1")] * 19 + [ScoreRequest("d", "1", None)]
    with RewardScorer(RewardConfig()) as scorer:
        results = scorer.score(requests)
    assert results[:19] == [Score(1.0)] * 19
    assert results[19] == Unscored(
        "raised ValueError: the ground truth is a NoneType; need text or a number"
    )


def test_math_separates_wrong_answers_from_broken_rows() -> None:
    requests = [
        ScoreRequest("d", "\\boxed{\\frac12}", "0.5"),
        ScoreRequest("d", "I do not know", "0.5"),
        ScoreRequest("d", "\\boxed{1}", ""),
        ScoreRequest("d", "\\boxed{3}", "3"),
        ScoreRequest("d", "\\boxed{9^{9^{9^{9^{9}}}}}", "3"),
    ]
    config = RewardConfig(function="math", timeout_s=60, max_unscored_frac=0.5)
    with RewardScorer(config) as scorer:
        results = scorer.score(requests)
    assert [r.value for r in results if isinstance(r, Score)] == [1.0, 0.0, 1.0, 0.0]
    assert results[2] == Unscored("raised ValueError: the ground truth is empty")


@pytest.mark.parametrize("function", ["exact", "math"])
def test_batch_returns_requested_results_in_requested_order(function: str) -> None:
    config = RewardConfig(function=function, cache_size=2, max_unscored_frac=0.0, timeout_s=600)
    with RewardScorer(config) as scorer:
        samples = {text: ScoreRequest("d", text, "3") for text in ("1", "2", "3")}
        for _ in range(2):
            with scorer.batch() as batch:
                batch.add("first", samples["3"])
                for text, sample in samples.items():
                    batch.add(text, sample)
                batch.add("first", samples["1"])
                # Its key is not among those of `results`, so it does not count as unscored.
                batch.add("stale", ScoreRequest("d", "1", {"no": "text"}))
                keys = ["3", "first", "2", "3"]
                assert batch.results(keys) == [Score(1.0), Score(0.0), Score(0.0), Score(1.0)]


def test_default_scoring_processes_do_not_exceed_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(scorer_module, "ScoringPool", lambda _, *numbers: made.append(numbers))
    for num_cores in (1, 8, 400):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        RewardScorer(RewardConfig(function="math"))
        RewardScorer(RewardConfig(function="math", num_workers=3))
    assert made == [(1, 1), (3, 3), (8, 1), (3, 3), (16, 1), (3, 3)]


def test_too_many_unscored_samples_stop_the_run(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(
        "def compute_score(solution_str, **rest):\n"
        "    return None if solution_str == 'odd' else 1.0\n",
        encoding="utf-8",
    )
    requests = [ScoreRequest("d", text, "") for text in ("odd", "even") * 5]
    with RewardScorer(RewardConfig(function=str(file), max_unscored_frac=0.5)) as scorer:
        assert scorer.score(requests).count(Score(1.0)) == 5
    with (
        RewardScorer(RewardConfig(function=str(file), max_unscored_frac=0.4)) as scorer,
        pytest.raises(RewardError) as error,
    ):
        scorer.score(requests)
    assert str(error.value) == (
        "5 of 10 samples could not be scored, more than rl.reward.max_unscored_frac = 0.4: "
        "5 x returned None; need a number"
    )


def test_the_share_is_compared_exactly() -> None:
    results = [Unscored("x"), *[Score(0.0)] * 9]
    check_unscored(results, 0.1)
    check_unscored([], 0.0)
    with pytest.raises(RewardError, match="1 of 10"):
        check_unscored(results, 0.0)
