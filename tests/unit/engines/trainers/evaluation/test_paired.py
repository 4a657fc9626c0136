"""The paired comparison against exact sign tests, and how often it tells equal models apart."""

import random
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trainers.evaluation.comparison import differences_of, paired_gain, problem_value
from infra.errors import ConfigError


def verdicts(num_lost: int, num_same: int, num_won: int) -> list[float]:
    return [-1.0] * num_lost + [0.0] * num_same + [1.0] * num_won


def is_beaten(differences: Sequence[float], confidence: float = 0.95, **draws: int) -> bool:
    gain = paired_gain(differences, confidence, **{"seed": 0, **draws})
    return gain.mean > gain.margin


def chance_of_so_many(num_won: int, num_lost: int) -> float:
    """McNemar's exact test, one-sided: a fair coin for each problem that changed."""
    changed = num_won + num_lost
    return sum(comb(changed, wins) for wins in range(num_won, changed + 1)) / 2**changed


def test_six_of_six_by_hand() -> None:
    # Sums of 6 signs: 6 with chance 1/64 = 0.016; 4 or less with 63/64 = 0.984, 2 or less with
    # 57/64 = 0.891. So 4 is the 0.975 quantile.
    gain = paired_gain(verdicts(0, 14, 6), 0.95, 0)
    assert (gain.mean, gain.margin, gain.num_problems) == (6 / 20, 4 / 20, 20)
    # Of 5 signs: 5 with chance 1/32 = 0.031, more than 0.025.
    gain = paired_gain(verdicts(0, 14, 5), 0.95, 0)
    assert (gain.mean, gain.margin) == (5 / 19, 5 / 19)
    assert is_beaten(verdicts(0, 14, 5), confidence=0.9)


def test_differences_of_many_sizes_by_hand() -> None:
    # 1, 2 and 4 with random signs: the eight sums -7, -5, ... 7, each with chance 1/8.
    gain = paired_gain([1.0, 2.0, 4.0], 0.5, 0)
    assert (gain.mean, gain.margin) == (7 / 3, 3 / 3)
    assert paired_gain([1.0, 2.0, 4.0], 0.8, 0).margin == 7 / 3


@pytest.mark.parametrize("num_lost", [0, 1, 3, 10, 40])
def test_verdicts_are_the_exact_test(num_lost: int) -> None:
    num_compared = 0
    for num_won in range(num_lost, num_lost + 40):
        chance = chance_of_so_many(num_won, num_lost)
        if abs(chance - 0.025) > 0.005:  # the error of the draws: 4.5 standard deviations
            num_compared += 1
            found = is_beaten(verdicts(num_lost, 100, num_won))
            assert found == (chance < 0.025), (num_won, num_lost, chance)
    assert num_compared > 30


def _verdict(of: random.Random) -> float:
    return float(of.random() < 0.8)


def _score(of: random.Random) -> float:
    return of.choice([0.0, 0.1, 0.1, 0.6, 1.0])


@pytest.mark.parametrize(
    ("num_problems", "value", "least"),
    [(16, _verdict, 0), (200, _verdict, 5), (40, _score, 5)],
)
def test_thousand_ties_are_won_no_more_often_than_stated(
    num_problems: int, value: Callable[[random.Random], float], least: int
) -> None:
    """Two models that are equally good: 25 wins are stated; 45 are four deviations above."""
    of = random.Random(7)
    num_wins = 0
    for tie in range(1000):
        differences = [value(of) - value(of) for _ in range(num_problems)]
        num_wins += is_beaten(differences, seed=tie, num_draws=1000)
    assert least <= num_wins <= 45


def test_a_better_model_is_found() -> None:
    of = random.Random(7)
    found = [
        is_beaten([float(of.random() < 0.9) - float(of.random() < 0.7) for _ in range(200)])
        for _ in range(100)
    ]
    assert sum(found) > 95


def test_equal_answers_are_no_win() -> None:
    assert paired_gain([0.0] * 5, 0.95, 0).margin == 0.0
    assert not is_beaten([0.0] * 5)
    with pytest.raises(ValueError, match="got no differences"):
        paired_gain([], 0.95, 0)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=30))
def test_paired_gain_ignores_problem_order_and_is_repeatable(
    values: list[float],
) -> None:
    gain = paired_gain(values, 0.9, 3, 100)
    assert gain == paired_gain(values, 0.9, 3, 100)
    again = paired_gain(values[::-1], 0.9, 3, 100)
    assert (again.mean, again.margin) == (gain.mean, gain.margin)
    assert gain.margin >= 0


def answer(correct: bool | None, score: float | None = None, **said: str) -> dict[str, Any]:
    return {"correct": correct, "score": float(bool(correct)) if score is None else score, **said}


def row(index: int, correct: bool | None, **changes: Any) -> dict[str, Any]:
    return {
        "index": index, "data_source": "sums", "prompt": f"{index}?", "ground_truth": str(index),
        "images": [],
        "greedy": answer(correct, 0.5 * index), "samples": [answer(correct)], **changes,
    }  # fmt: skip


def write(directory: Path, *rows: dict[str, Any]) -> Path:
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(list(rows)), directory / "rows.parquet")
    return directory


def test_problems_match_by_number_and_unscored_are_left_out(tmp_path: Path) -> None:
    now = write(tmp_path / "now", row(0, True), row(1, False), row(2, None), row(3, True))
    before = write(tmp_path / "before", row(3, False), row(1, True), row(2, True), row(0, True))
    assert differences_of(now, before, "accuracy") == [0, -1, 1]
    assert differences_of(now, before, "reward/mean") == [0, 0, 0, 0]
    assert differences_of(now, before, "pass@1") == [0, -1, 1]


@pytest.mark.parametrize(
    "other", [row(2, True), row(1, True, data_source="products"), row(1, True, ground_truth="7")]
)
def test_other_problems_are_refused_by_name(tmp_path: Path, other: dict[str, Any]) -> None:
    now = write(tmp_path / "now", row(0, True), row(1, True))
    before = write(tmp_path / "before", row(0, True), other)
    with pytest.raises(ConfigError, match=r"2 differ, the first is problem 1 of \w+") as caught:
        differences_of(now, before, "accuracy")
    assert caught.value.path == "inputs.incumbent_evaluation"


def test_rows_of_one_problem_are_one_difference(tmp_path: Path) -> None:
    """Thirty-two copies of each of two problems, one of which went better: no evidence at all."""
    copies = [
        row(index, index < 32, prompt=f"{index // 32}?", ground_truth="7") for index in range(64)
    ]
    now = write(tmp_path / "now", *copies)
    before = write(tmp_path / "before", *({**each, "greedy": answer(False)} for each in copies))
    assert differences_of(now, before, "accuracy") == [1, 0]


def test_a_difference_weighs_as_much_as_its_rows(tmp_path: Path) -> None:
    same = {"prompt": "a?", "ground_truth": "7"}
    now = write(tmp_path / "now", row(0, True, **same), row(1, True, **same), row(2, False))
    before = write(tmp_path / "before", row(0, False, **same), row(1, True, **same), row(2, True))
    # Sums 1 and -1 of three rows; their mean is that over rows, 0.
    assert differences_of(now, before, "accuracy") == pytest.approx([2 / 3, -2 / 3])


@pytest.mark.parametrize(
    "other", [{"prompt": "b?"}, {"ground_truth": "8"}, {"images": ["cd"]}, {"images": ["ab", "ab"]}]
)
def test_prompt_truth_and_images_name_a_problem(tmp_path: Path, other: dict[str, Any]) -> None:
    same = {"prompt": "a?", "ground_truth": "7", "images": ["ab"]}
    rows = [row(0, True, **same), row(1, True, **{**same, **other})]
    before = [{**each, "greedy": answer(False)} for each in rows]
    found = differences_of(
        write(tmp_path / "now", *rows), write(tmp_path / "before", *before), "accuracy"
    )
    assert found == [1, 1]


def test_an_evaluation_without_digests_of_images_is_compared(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row(i, True).items() if k != "images"} for i in range(2)]
    now, before = write(tmp_path / "now", *rows), write(tmp_path / "before", *rows)
    assert differences_of(now, before, "accuracy") == [0, 0]


def test_what_only_one_has_a_value_of_is_not_compared(tmp_path: Path) -> None:
    now, before = write(tmp_path / "now", row(0, None)), write(tmp_path / "before", row(0, True))
    assert differences_of(now, before, "accuracy") == []


def test_pass_at_k_of_a_problem_needs_enough_scored_samples() -> None:
    samples = [answer(True), answer(False), answer(None), answer(False)]
    # Of the 3 pairs of the 3 scored samples, one holds no right one.
    assert problem_value({"samples": samples}, "pass@2") == pytest.approx(2 / 3)
    assert problem_value({"samples": samples}, "pass@4") is None


def test_maj_at_k_needs_every_sample_answer_but_avg_at_k_none() -> None:
    said = [answer(True, answer="4"), answer(True, answer="4"), answer(False, answer="5")]
    assert problem_value({"samples": said}, "maj@3") == 1.0
    assert problem_value({"samples": said}, "avg@3") == pytest.approx(2 / 3)
    unsaid = [*said, answer(False)]
    assert problem_value({"samples": unsaid}, "maj@3") is None
    assert problem_value({"samples": unsaid}, "avg@3") == 0.5
