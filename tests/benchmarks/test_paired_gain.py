"""The interval of a paired gain, against numbers worked by hand, and the table that shows it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recipes
from paired_gain import PairedVerdicts, paired_gain

NEVER = (False,) * 4


def verdicts(num_lost: int, num_same: int, num_won: int) -> PairedVerdicts:
    before = (True,) * num_lost + (False,) * (num_same + num_won)
    after = (False,) * (num_lost + num_same) + (True,) * num_won
    return PairedVerdicts(before, after)


def test_one_problem_of_two_won_by_hand() -> None:
    # Two draws with replacement of {0, 1}: sums 0, 1, 2 with chances 1/4, 1/2, 1/4.
    pair = verdicts(0, 1, 1)
    whole = paired_gain([pair])
    assert (whole.mean, whole.low, whole.high) == (0.5, 0.0, 1.0)
    assert not whole.holds
    # Between the quantiles 0.3 and 0.7 lies the middle one alone.
    middle = paired_gain([pair], confidence=0.4)
    assert (middle.low, middle.high) == (0.5, 0.5)
    assert middle.holds


def test_twenty_of_a_hundred_won_is_the_binomial_of_the_tables() -> None:
    # Binomial(100, 0.2): P(X <= 11) = 0.0126, P(X <= 12) = 0.0253; P(X <= 27) = 0.9658,
    # P(X <= 28) = 0.9800.
    gain = paired_gain([verdicts(0, 80, 20)])
    assert gain.mean == 0.2
    assert gain.low == pytest.approx(0.12, abs=0.011)
    assert gain.high == pytest.approx(0.28, abs=0.011)


def test_losses_count_against_wins() -> None:
    # d = 0.1, E d^2 = 0.3, so the deviation of the mean of 400 is sqrt(0.29 / 400) = 0.0269; the
    # normal interval is 0.1 -+ 1.96 * 0.0269.
    gain = paired_gain([verdicts(40, 280, 80)])
    assert gain.mean == pytest.approx(0.1)
    assert gain.low == pytest.approx(0.0472, abs=0.004)
    assert gain.high == pytest.approx(0.1528, abs=0.004)


def test_nothing_changed_and_everything_won_have_no_width() -> None:
    same, all_won = paired_gain([verdicts(0, 4, 0)]), paired_gain([verdicts(0, 0, 4)])
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    assert (all_won.mean, all_won.low, all_won.high) == (1.0, 1.0, 1.0)


def test_a_worse_seed_is_named_although_the_pool_gains() -> None:
    gain = paired_gain([verdicts(0, 100, 300), verdicts(1, 399, 0)])
    assert gain.low > 0
    assert gain.num_worse_seeds == 1
    assert not gain.holds


def test_seeds_are_pooled_by_their_problems() -> None:
    # 30 won of 100 and 10 lost of 100: 20 of 200.
    assert paired_gain([verdicts(0, 70, 30), verdicts(10, 90, 0)]).mean == pytest.approx(0.1)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no seeds"):
        paired_gain([])
    with pytest.raises(ValueError, match="need as many"):
        PairedVerdicts(NEVER, NEVER[:3])


def write_evaluation(home: Path, digest: str, right: list[bool], first: int = 0) -> None:
    directory = home / "store" / "artifacts" / "evaluation" / digest
    directory.mkdir(parents=True)
    rows = [
        {
            "index": first + place,
            "prompt": f"{place} + 1",
            "ground_truth": str(place + 1),
            # Whatever judged the answer in the run, a table looks at its text.
            "greedy": {"text": f" {place + 1 if each else place}", "correct": not each},
        }
        for place, each in enumerate(right)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "rows.parquet")


REPORT = {
    "seed": 3,
    "stages": [
        {"name": "sft", "digest": "s", "reused": True, "seconds": 20.0},
        {"name": "evaluate_sft", "digest": "a", "reused": True, "seconds": 2.0},
        {"name": "evaluate", "digest": "b", "reused": False, "seconds": 4.0},
    ],
}


def test_a_result_pairs_start_and_end_and_is_found_again(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "a", [True, False, False])
    write_evaluation(tmp_path, "b", [True, True, False])
    result = recipes.result_of(tmp_path, REPORT, "grpo", "abc", 12.5)
    assert (result.before, result.after) == ((True, False, False), (True, True, False))
    assert result.reused == ("sft", "evaluate_sft")
    assert result.wall_s == 12.5 + 20.0 + 2.0
    assert recipes.kept_result(tmp_path, "grpo", 3) is None
    path = recipes.result_path(tmp_path, "grpo", 3)
    path.parent.mkdir()
    path.write_text(json.dumps(recipes.asdict(result)))
    assert recipes.kept_result(tmp_path, "grpo", 3) == result
    assert recipes.kept_result(tmp_path, "grpo", 4) is None


def test_the_report_is_the_one_that_the_run_names(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "sft  reused\nreport      /home/of runs/grpo-seed3-ab/report.md\nMLflow  mlflow ui\n"
    )
    assert recipes.report_path(log) == Path("/home/of runs/grpo-seed3-ab/report.json")
    log.write_text("rl.reward: got 3; need a name; the report is not there\n")
    assert recipes.report_path(log) is None


def test_other_problems_are_refused(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "a", [True])
    write_evaluation(tmp_path, "b", [True], first=1)
    with pytest.raises(ValueError, match="different problems"):
        recipes.result_of(tmp_path, REPORT, "grpo", "abc", 1.0)


def test_the_table_says_what_a_recipe_lacks() -> None:
    def row(after: tuple[bool, ...], wall_s: float) -> tuple[str, ...]:
        return recipes.row_of([recipes.Result("grpo", 0, "abc", wall_s, (), NEVER, after)])

    assert row((True,) * 4, 100.0)[3:6] == ("0.0%", "100.0%", "+100.0 (+100.0 to +100.0)")
    assert row((True,) * 4, 100.0)[-1] == "yes"
    assert row(NEVER, 300.0)[-1] == "no gain, above 240 s"
    table = recipes.table_of([row((True,) * 4, 100.0)])
    assert table.startswith("| recipe | seeds |")
    assert len({line.count("|") for line in table.splitlines()[:3]}) == 1
