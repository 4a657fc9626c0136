"""Evaluation over a scripted sampler: what is counted, what is left out, what is written."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engines.config.algorithm import RewardConfig
from engines.config.model import TokenizerConfig
from engines.config.sections import EvaluationConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.examples import RLPrompt, rl_prompts
from engines.data.read.rows import IMAGE_MARK, Image, Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.rewards.base import Score, is_correct
from engines.rewards.scorer import RewardScorer
from engines.trainers.evaluation.accuracy import wilson_interval
from engines.trainers.evaluation.evaluator import (
    Answer,
    EvaluatedProblem,
    Evaluation,
    Evaluator,
    by_source,
    summarize,
    told_sources,
    write_evaluation,
)
from engines.trainers.scoring import CompletionScorer
from engines.types import Completion, RolloutRequest, SamplingParams
from infra.errors import ConfigError

TRUTHS = ("1", "2", "3", "4")
SOURCES = ("even", "odd", "even", "odd")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    directory = train_tokenizer(
        TokenizerConfig(),
        ["0123456789?"],
        tmp_path_factory.mktemp("tokenizer"),
        max_length=32,
        chat_template=None,
    )
    return DirectoryTokenizer.load(directory)


@pytest.fixture(scope="module")
def prompts(tokenizer: DirectoryTokenizer) -> tuple[RLPrompt, ...]:
    rows = [
        RLRow(source, (Message("user", f"{truth}?"),), "", RewardModel("rule", truth))
        for truth, source in zip(TRUTHS, SOURCES, strict=True)
    ]
    return rl_prompts(rows, tokenizer)


def evaluate(
    tokenizer: DirectoryTokenizer,
    prompts: Sequence[RLPrompt],
    greedy: Sequence[str],
    sampled: Sequence[Sequence[str]] = ((),) * 4,
    **config,
) -> tuple[Evaluation, list[RolloutRequest]]:
    """Evaluate a sampler that says what it is told."""
    asked: list[RolloutRequest] = []

    def generate(requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        asked.extend(requests)
        texts = [[text] for text in greedy]
        if requests[0].sampling.temperature:
            texts = [list(row) for row in sampled]
        return [
            [_completion(request, i, text, tokenizer) for i, text in enumerate(row)]
            for request, row in zip(requests, texts, strict=True)
        ]

    with RewardScorer(RewardConfig(function="exact", max_unscored_frac=1)) as rewards:
        evaluator = Evaluator(
            EvaluationConfig(max_new_tokens=4, **config),
            prompts,
            CompletionScorer(rewards, tokenizer),
            seed=1,
        )
        reports: list[tuple[int, int]] = []
        evaluation = evaluator.run(generate, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (len(evaluation.problems), len(evaluation.problems))
    return evaluation, asked


def _completion(request, index: int, text: str, tokenizer: DirectoryTokenizer) -> Completion:
    if text == "abort":
        return Completion(request.request_id, index, (), (), (), "abort")
    end = tokenizer.eos_token_id
    assert end is not None
    ids = (*tokenizer.encode(text, add_special_tokens=False), end)
    zeros = (0,) * len(ids)
    return Completion(request.request_id, index, ids, zeros, zeros, "stop")


def test_greedy_accuracy_with_its_interval_and_by_source(tokenizer, prompts) -> None:
    evaluation, asked = evaluate(tokenizer, prompts, ["1", "2", "9", "4"])
    metrics = evaluation.metrics
    assert metrics["accuracy"] == 0.75
    # Wilson for 3 of 4: (0.75 + z^2/8 -+ z sqrt(0.1875/4 + z^2/64)) / (1 + z^2/4), z = 1.96.
    assert metrics["accuracy_low"] == pytest.approx(0.300642, abs=1e-4)
    assert metrics["accuracy_high"] == pytest.approx(0.954413, abs=1e-4)
    assert evaluation.sources["even"]["accuracy"] == 0.5
    assert evaluation.sources["odd"]["accuracy"] == 1.0
    assert metrics["response_length/mean"] == 2
    assert {request.sampling.temperature for request in asked} == {0.0}
    assert [problem.greedy.text for problem in evaluation.problems] == ["1", "2", "9", "4"]


def test_what_could_not_be_scored_is_left_out_and_counted(tokenizer, prompts) -> None:
    metrics = evaluate(tokenizer, prompts, ["1", "abort", "9", "abort"])[0].metrics
    assert (metrics["accuracy"], metrics["num_unscored"]) == (0.5, 2)
    nothing = evaluate(tokenizer, prompts, ["abort"] * 4)[0].metrics
    assert "accuracy" not in nothing
    assert nothing["num_unscored"] == 4


def test_pass_at_k_over_samples(tokenizer, prompts) -> None:
    """Right of 2 samples: 2, 1, 0, 1: pass@1 = (1 + .5 + 0 + .5) / 4, pass@2 = (1+1+0+1) / 4."""
    sampled = [("1", "1"), ("2", "0"), ("0", "0"), ("4", "3")]
    evaluation, asked = evaluate(
        tokenizer, prompts, ["0"] * 4, sampled, num_samples=2, pass_at=(1, 2), temperature=0.8
    )
    assert evaluation.metrics["pass@1"] == 0.5
    assert evaluation.metrics["pass@2"] == 0.75
    assert evaluation.metrics["pass@1_low"] < 0.5 < evaluation.metrics["pass@1_high"]
    assert evaluation.metrics["avg@2"] == 0.5
    # Pairs: two votes for 1; 2 and 0 tie; 0 twice; 4 and 3 tie.
    assert evaluation.metrics["maj@2"] == 0.5
    assert evaluation.metrics["best@2"] == 0.75
    assert evaluation.sources["even"]["maj@2"] == 0.5
    assert by_source(evaluation) == evaluation.sources
    told = told_sources(evaluation)
    assert told["source/even/maj@2"] == 0.5
    assert "source/even/response_length/mean" not in told
    alone, _ = evaluate(tokenizer, prompts[:1], ["1"])
    assert told_sources(alone) == {}
    assert [answer.answer for answer in evaluation.problems[1].samples] == ["2", "0"]
    seeds = [seed for request in asked if request.num_samples == 2 for seed in request.seeds]
    assert len(set(seeds)) == 8


def test_only_the_first_problems_when_fewer_are_asked_for(tokenizer, prompts) -> None:
    evaluation, _ = evaluate(tokenizer, prompts, ["1", "2"], num_problems=2)
    assert evaluation.metrics["num_problems"] == 2
    with pytest.raises(ConfigError, match="max_new_tokens: missing; need a number of tokens"):
        Evaluator(EvaluationConfig(), prompts, None, 0)  # pyright: ignore[reportArgumentType]


def test_the_files_hold_every_text_and_repeat_bitwise(tokenizer, prompts, tmp_path: Path) -> None:
    sampled = [("1", "5"), ("2", "0"), ("0", "abort"), ("4", "3")]
    evaluation, _ = evaluate(
        tokenizer, prompts, ["1", "2", "abort", "4"], sampled, num_samples=2, pass_at=(1,)
    )
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_evaluation(evaluation, tmp_path / name)
    for file in ("rows.parquet", "summary.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    rows = pq.read_table(tmp_path / "a" / "rows.parquet").to_pylist()
    assert [row["greedy"]["text"] for row in rows] == ["1", "2", "", "4"]
    assert [row["greedy"]["correct"] for row in rows] == [True, True, None, True]
    assert [answer["text"] for answer in rows[0]["samples"]] == ["1", "5"]
    assert [answer["answer"] for answer in rows[2]["samples"]] == ["0", None]
    assert rows[0]["prompt"].count("1?") == 1
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["metrics"] == evaluation.metrics
    assert set(summary["sources"]) == {"even", "odd"}


@pytest.mark.parametrize(
    ("score", "correct"),
    [
        (Score(1.0), True),
        (Score(0.0), False),
        (Score(-1.0), False),
        (Score(0.1), False),
        (Score(-1.0, {"acc": 1.0}), True),
        (Score(1.0, {"acc": 0.0}), False),
    ],
)
def test_the_verdict_of_a_score(score: Score, correct: bool) -> None:
    assert is_correct(score) is correct


def test_answers_end_where_the_configuration_says(tokenizer, prompts) -> None:
    ends = {"stop": ("</a>",), "stop_token_ids": (5,)}
    _, asked = evaluate(
        tokenizer, prompts, ["1"] * 4, [["1"] * 2] * 4, num_samples=2, temperature=0.7, **ends
    )
    assert {request.sampling for request in asked} == {
        SamplingParams(4, temperature, stop=("</a>",), stop_token_ids=(5,))
        for temperature in (0.0, 0.7)
    }


def test_only_the_sampled_part_is_cut_to_likely_tokens(tokenizer, prompts) -> None:
    cut = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    _, asked = evaluate(tokenizer, prompts, ["1"] * 4, [["1"] * 2] * 4, num_samples=2, **cut)
    assert {request.sampling for request in asked} == {
        SamplingParams(4, 0.0),
        SamplingParams(4, **cut),
    }


def test_rows_that_repeat_a_problem_narrow_no_interval(tokenizer) -> None:
    asked = [("1?", "1")] * 6 + [("2?", "2"), ("2?", "3"), ("3?", "3")]
    rows = [
        RLRow("sums", (Message("user", text),), "", RewardModel("rule", truth))
        for text, truth in asked
    ]
    greedy = ["1"] * 6 + ["2", "9", "9"]
    metrics = evaluate(
        tokenizer,
        rl_prompts(rows, tokenizer),
        greedy,
        [(text,) for text in greedy],
        num_samples=1,
    )[0].metrics
    assert (metrics["num_problems"], metrics["num_distinct_problems"]) == (9, 4)
    # Six copies and three others weigh as 81 / (36 + 3) verdicts.
    expected = wilson_interval(7 / 9 * 81 / 39, 81 / 39, 0.95)
    for metric in ("accuracy", "pass@1"):
        assert metrics[metric] == 7 / 9
        found = (metrics[f"{metric}_low"], metrics[f"{metric}_high"])
        assert found == pytest.approx(expected)


def test_images_tell_problems_of_one_text_apart(tmp_path: Path) -> None:
    """Of a data set of figures many prompts are `Find x`, and some of their answers are equal."""
    digests = [("ab",), ("cd",), ("ab",)]
    truth = RewardModel("rule", "1")
    problems = tuple(
        EvaluatedProblem(
            RLPrompt(
                index,
                RLRow("s", (Message("user", f"{IMAGE_MARK}x?", images=shown),), "", truth),
                (1,),
            ),
            "x?",
            Answer("1", 1.0, True, "stop", 1),
            (),
        )
        for index, shown in enumerate((Image(each),) for [each] in digests)
    )
    metrics = summarize(problems, EvaluationConfig(), 0)
    assert metrics["num_distinct_problems"] == 2
    write_evaluation(Evaluation(problems, metrics, {}), tmp_path)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [tuple(row["images"]) for row in rows] == digests
