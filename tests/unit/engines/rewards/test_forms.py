"""Forms of reward functions: what each is called with, and what its answer means."""

from pathlib import Path

import numpy as np
import pytest

from engines.config.algorithm import RewardConfig
from engines.rewards.base import (
    Form,
    SampledTokens,
    Score,
    ScoreRequest,
    Unscored,
    arguments,
    form_of,
    result,
)
from engines.rewards.scorer import RewardScorer

REQUEST = ScoreRequest(
    "d", "two", "2", {"index": 7}, SampledTokens((1, 2), (8, 9), (-0.5, -0.25), "length", 3)
)
FILE = """
def sample_form(sample, factor=1.0):
    assert sample.data_source == "d" and sample.solution_str == "two"
    assert sample.ground_truth == "2" and sample.extra_info == {"index": 7}
    tokens = sample.tokens
    assert tokens.prompt_ids == (1, 2) and tokens.token_ids == (8, 9)
    return {
        "score": factor * sum(tokens.logprobs),
        "cut": tokens.finish_reason == "length",
        "turns": tokens.num_turns,
    }

def lists_form(data_sources, solution_strs, ground_truths, extra_infos, factor=1.0):
    return [factor * len(text) for text in solution_strs]

def text_form(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["num_turns"])

def hang(sample):
    while True:
        pass
"""


def text_form(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...


def with_a_sample_of_its_own(solution_str, sample=None, **rest): ...


def any_form(**kwargs): ...


def sample_form(sample, *, factor=1.0): ...


def lists_form(data_sources, solution_strs, ground_truths, extra_infos=None): ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (text_form, "text"),
        (with_a_sample_of_its_own, "text"),
        (any_form, "text"),
        (max, "text"),
        (sample_form, "sample"),
        (lists_form, "lists"),
    ],
)
def test_the_parameters_say_which_form_it_is(function, form: Form) -> None:
    assert form_of(function) == form


def test_what_each_form_is_called_with() -> None:
    extra_info = {"index": 7, "num_turns": 3}
    assert arguments("sample", REQUEST) == {"sample": REQUEST}
    assert arguments("text", REQUEST) == {
        "data_source": "d", "solution_str": "two", "ground_truth": "2", "extra_info": extra_info,
    }  # fmt: skip
    assert arguments("lists", REQUEST) == {
        "data_sources": ["d"], "solution_strs": ["two"], "ground_truths": ["2"],
        "extra_infos": [extra_info],
    }  # fmt: skip
    assert arguments("text", ScoreRequest("d", "two", "2", {"a": 1}))["extra_info"] == {"a": 1}
    with pytest.raises(ValueError, match="the sample has no tokens"):
        arguments("sample", ScoreRequest("d", "two", "2"))


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ([0.5], Score(0.5)),
        ((1,), Score(1.0)),
        (np.array([0.5]), Score(0.5)),
        ([{"score": 1.0, "acc": True}], Score(1.0, {"acc": 1.0})),
        ([None], Unscored("returned None; need a number")),
        ([], Unscored("returned 0 scores for 1 sample")),
        ([1.0, 2.0], Unscored("returned 2 scores for 1 sample")),
        (0.5, Unscored("returned a float; need a list with one score for each sample")),
        (None, Unscored("returned None; need a list with one score for each sample")),
        ("1", Unscored("returned a str; need a list with one score for each sample")),
    ],
)
def test_lists_answer_with_a_list(returned: object, found: Score | Unscored) -> None:
    assert result("lists", returned) == found


def scored(tmp_path: Path, name: str, request: ScoreRequest = REQUEST, **settings) -> object:
    file = tmp_path / "forms.py"
    file.write_text(FILE, encoding="utf-8")
    config = RewardConfig(function=f"{file}:{name}", max_unscored_frac=1, **settings)
    with RewardScorer(config) as scorer:
        [found] = scorer.score([request])
    return found


def test_every_form_runs_in_the_scoring_processes(tmp_path: Path) -> None:
    """-0.5 - 0.25 = -0.75, doubled."""
    kwargs = {"factor": 2.0}
    found = scored(tmp_path, "sample_form", kwargs=kwargs)
    assert found == Score(-1.5, {"cut": 1.0, "turns": 3.0})
    assert scored(tmp_path, "lists_form", kwargs=kwargs) == Score(6.0)
    assert scored(tmp_path, "text_form") == Score(3.0)


def test_a_function_of_samples_is_held_to_the_same_deadline(tmp_path: Path) -> None:
    found = scored(tmp_path, "hang", timeout_s=0.5)
    assert found == Unscored("missed the deadline of 0.5 s")


def test_a_text_that_was_not_sampled_has_no_tokens_to_judge(tmp_path: Path) -> None:
    found = scored(tmp_path, "sample_form", ScoreRequest("d", "two", "2"))
    assert isinstance(found, Unscored)
    assert "the sample has no tokens" in found.reason
