"""Two evaluations, metric by metric, by hand."""

from pathlib import Path

import pytest

from engines.config.sections import EvaluationConfig
from engines.data.read.examples import RLPrompt
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.trainers.evaluation.comparison import (
    MetricGain,
    compared_metrics,
    comparison_json,
    comparison_metrics,
    metric_gain,
)
from engines.trainers.evaluation.evaluator import (
    Answer,
    EvaluatedProblem,
    Evaluation,
    summarize,
    write_evaluation,
)
from flows.report.report import measured_tables
from infra.tracking.comparison import verdicts
from tasks.runner.run import headline_metric


def evaluation(directory: Path, right: str, num_samples: int = 0) -> Path:
    """Of one problem for each letter: `r`ight, `w`rong, or `u`nscored."""
    directory.mkdir()

    def answer(letter: str) -> Answer:
        score = {"r": 1.0, "w": 0.0, "u": None}[letter]
        return Answer("x", score, None if score is None else bool(score), "stop", 1, "x")

    problems = tuple(
        EvaluatedProblem(
            RLPrompt(
                index,
                RLRow("s", (Message("user", f"{index}?"),), "m", RewardModel("rule", "1"), {}),
                (1,),
            ),
            f"{index}?",
            answer(letter),
            (answer(letter),) * num_samples,
        )
        for index, letter in enumerate(right)
    )
    config = EvaluationConfig(num_samples=num_samples, pass_at=(1,))
    write_evaluation(Evaluation(problems, summarize(problems, config, 0), {}), directory)
    return directory


def test_what_both_have_is_compared(tmp_path: Path) -> None:
    ours = evaluation(tmp_path / "ours", "rw", num_samples=1)
    theirs = evaluation(tmp_path / "theirs", "ww")
    assert compared_metrics(ours, theirs) == ["accuracy", "reward/mean"]
    assert compared_metrics(ours, ours) == [
        "accuracy",
        "avg@1",
        "maj@1",
        "pass@1",
        "reward/mean",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "gain"),
    [
        # Six changed, all one way: chance 1/64, below 0.025; five: 1/32, above it.
        ("rrrrrr" + "w" * 14, "wwwwww" + "w" * 14, "better", 0.3),
        ("wwwwww" + "w" * 14, "rrrrrr" + "w" * 14, "worse", -0.3),
        ("rrrrr" + "w" * 15, "wwwww" + "w" * 15, "alike", 0.25),
        ("rw", "rw", "alike", 0.0),
    ],
)
def test_the_verdict_is_the_sign_test_s(
    ours: str, theirs: str, verdict: str, gain: float, tmp_path: Path
) -> None:
    found = metric_gain(
        evaluation(tmp_path / "a", ours), evaluation(tmp_path / "b", theirs), "accuracy", 0.95, 0
    )
    assert found is not None
    assert (found.verdict, found.gain) == (verdict, pytest.approx(gain))
    assert found.value - found.other == pytest.approx(gain)


def test_a_problem_without_a_score_is_in_neither(tmp_path: Path) -> None:
    found = metric_gain(
        evaluation(tmp_path / "a", "rru"), evaluation(tmp_path / "b", "wur"), "accuracy", 0.95, 0
    )
    assert found is not None
    assert (found.num_problems, found.gain) == (1, 1.0)
    assert (found.value, found.other) == (1.0, 0.5)


def test_a_metric_that_no_problem_has_in_both_is_left_out(tmp_path: Path) -> None:
    ours, theirs = evaluation(tmp_path / "a", "ru"), evaluation(tmp_path / "b", "ur")
    assert metric_gain(ours, theirs, "accuracy", 0.95, 0) is None


def test_the_file() -> None:
    gain = MetricGain("accuracy", 0.5, 0.25, 0.25, 0.1, 8, higher_is_better=True)
    assert comparison_json([gain], 0.95) == {
        "schema": 1,
        "confidence": 0.95,
        "metrics": {
            "accuracy": {
                "value": 0.5,
                "against": 0.25,
                "gain": 0.25,
                "margin": 0.1,
                "num_problems": 8,
                "higher_is_better": True,
                "verdict": "better",
            }
        },
    }
    assert str(gain) == "accuracy 0.5 against 0.25: better (+0.25, chance 0.1)"


def test_the_stage_s_metrics_say_which_way_is_better() -> None:
    gains = [
        MetricGain("accuracy", 0.5, 0.25, 0.25, 0.1, 8, higher_is_better=True),
        MetricGain("t/toxicity", 0.9, 0.1, 0.8, 0.24, 8, higher_is_better=False),
        MetricGain("t/length", 0.9, 0.1, 0.8, 0.24, 8, higher_is_better=None),
        MetricGain("t/words", 0.1, 0.9, -0.8, 0.24, 8, higher_is_better=None),
    ]
    found = comparison_metrics(gains)
    assert verdicts(found) == {
        "accuracy": "better",
        "t/toxicity": "worse",
        "t/length": "higher",
        "t/words": "lower",
    }
    assert (found["gain/t/toxicity"], found["margin/t/toxicity"]) == (0.8, 0.24)
    assert headline_metric(comparison_metrics(gains[1:2])).endswith("chance 0.24: worse")
    [*_, row, _] = measured_tables({"compare_t": comparison_metrics(gains[1:2])})
    assert row == "| compare_t | t/toxicity | +0.8000 | 0.2400 | worse |"


def test_a_gain_that_says_no_direction_is_no_praise() -> None:
    assert verdicts({"gain/t/toxicity": 0.8, "margin/t/toxicity": 0.2}) == {"t/toxicity": "higher"}
