"""Pairs of a policy's own answers, by hand."""

import pytest
from pydantic import ValidationError

from engines.config.rollout import SamplingConfig
from engines.config.sections import SelfPlayConfig
from engines.data.read.examples import RLPrompt
from engines.data.read.rows import Message, PreferenceRow, RewardModel, RLRow, SFTRow
from engines.jobs.self_play import (
    OwnAnswer,
    as_prompt,
    best_worst_pair,
    chosen_rows,
    own_answers,
    requests_of,
    spin_pair,
)
from engines.rewards.base import Score
from engines.types import Completion, RolloutRequest
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError

PROMPT = (Message("system", "Add."), Message("user", "1+1="))
ROW = RLRow("sums", PROMPT, "", RewardModel("rule", "2"))


def completion(text: str, finish_reason: str = "stop") -> Completion:
    """Whose tokens are its characters."""
    ids = tuple(map(ord, text))
    return Completion("r", 0, ids, (-1.0,) * len(ids), (0,) * len(ids), finish_reason)


def decoded(completion: Completion) -> str:
    return "".join(map(chr, completion.token_ids.tolist()))


def test_a_conversation_asks_for_its_first_answer() -> None:
    again = (Message("user", "2+2="), Message("assistant", "4"))
    rows = [
        SFTRow((*PROMPT, Message("assistant", "2")), "sums"),
        SFTRow((*PROMPT, Message("assistant", "2"), *again), "sums"),
    ]
    assert [as_prompt(row) for row in rows] == [ROW, ROW]


def test_truncated_blank_or_unscored_answer_forms_no_pair() -> None:
    completions = [
        completion("3"), completion("4", "length"), completion(" "), completion("5"),
    ]  # fmt: skip
    assert [*own_answers(completions, None, decoded)] == [OwnAnswer("3"), OwnAnswer("5")]
    scores = [Score(0.5), Score(1.0), Score(0.0), None]
    assert [*own_answers(completions, scores, decoded)] == [OwnAnswer("3", 0.5)]


def test_spin_prefers_data_answer_over_first_different_answer() -> None:
    answers = [OwnAnswer("2"), OwnAnswer(" 2\n"), OwnAnswer("3"), OwnAnswer("4")]
    assert spin_pair(ROW, answers) == PreferenceRow(PROMPT, "2", "3", "sums")
    assert spin_pair(ROW, answers[:2]) is None
    assert spin_pair(ROW, []) is None


def test_the_best_answer_is_preferred_to_the_worst() -> None:
    answers = [OwnAnswer("a", 0.5), OwnAnswer("b", 0.25), OwnAnswer("c", 2.0), OwnAnswer("d", 2.0)]
    assert best_worst_pair(ROW, answers) == PreferenceRow(PROMPT, "c", "b", "sums", 1.75)
    assert best_worst_pair(ROW, answers[:1]) is None
    assert best_worst_pair(ROW, answers[2:]) is None, "equal rewards"
    assert best_worst_pair(ROW, [OwnAnswer("a", 1.0), OwnAnswer("a ", 0.0)]) is None, "equal texts"
    assert best_worst_pair(ROW, []) is None


def test_iterations_go_through_the_rows() -> None:
    assert [*chosen_rows(3, None, 0, 2)] == [0, 1, 2]
    first, second, third = (chosen_rows(5, 2, 7, iteration) for iteration in (1, 2, 3))
    assert len({*first, *second}) == 4
    assert sorted([*first, *second, third[0]]) == [0, 1, 2, 3, 4]
    assert chosen_rows(5, 2, 7, 1) == first
    assert chosen_rows(5, 5, 7, 1) != chosen_rows(5, 5, 8, 1)


def test_seeds_differ_by_iteration_prompt_and_sample() -> None:
    prompts = [RLPrompt(4, ROW, (1, 2)), RLPrompt(7, ROW, (1, 2))]

    def asked(iteration: int, some: slice = slice(None)) -> list[RolloutRequest]:
        return requests_of(prompts[some], SamplingConfig(), 3, seed=0, iteration=iteration)

    requests = [*asked(1), *asked(2)]
    assert len({request.request_id for request in requests}) == 4
    assert len({seed for request in requests for seed in request.seeds}) == 12
    assert [*asked(1, slice(0, 1)), *asked(1, slice(1, 2))] == requests[:2]


def test_answers_that_cannot_differ_are_refused() -> None:
    with pytest.raises(ValidationError, match="num_samples: got 1 .* need 2 or more"):
        SelfPlayConfig(source="best_worst", num_samples=1)
    greedy = ["preference={self_play: {num_samples: 2, sampling: {temperature: 0}}}"]
    with pytest.raises(ConfigError, match=r"self_play.sampling.temperature: got 0 with several"):
        load_recipe("quickstart", greedy)


def test_how_many_answers_there_are_by_themselves() -> None:
    assert SelfPlayConfig().samples_per_prompt == 1
    assert SelfPlayConfig(source="best_worst").samples_per_prompt == 8
