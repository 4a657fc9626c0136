"""Completions to scored samples: shaping beside the score, unscored and aborted left out."""

import random
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.algorithm import OverlongConfig, RewardConfig
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.errors import RewardError
from engines.judges.asking import Judges
from engines.rewards.base import Score
from engines.rewards.scorer import RewardScorer
from engines.trainers.prompts import PromptBatch
from engines.trainers.scoring import BatchScoring, CompletionScorer, ScoredBatch
from engines.types import Completion, RolloutRequest, SamplingParams
from infra.waiting import wait_for


class Digits:
    """Token i is the digit i."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += 1
        return "".join(str(token) for token in token_ids)


def prompt_batch(*truths, greedy: bool = False) -> PromptBatch:
    rows = tuple(
        RLRow("s", (Message("user", "q"),), "", RewardModel("rule", truth)) for truth in truths
    )
    requests = tuple(
        RolloutRequest(f"p{i}", (5, 6), SamplingParams(8), (1, 2)) for i in range(len(truths))
    )
    asked_greedily = tuple(
        RolloutRequest(f"{each.request_id}/greedy", (5, 6), SamplingParams(8), (1,))
        for each in requests
        if greedy
    )
    return PromptBatch(4, rows, requests, asked_greedily)


def completion(*tokens: int, reason: str = "stop") -> Completion:
    zeros = (0,) * len(tokens)
    return Completion("p", 0, tokens, zeros, zeros, reason)


def scorer(rewards: RewardScorer, **overlong) -> CompletionScorer:
    return CompletionScorer(rewards, Digits(), OverlongConfig(**overlong), 8)  # pyright: ignore[reportArgumentType]


def begin(scorer: CompletionScorer, prompts: PromptBatch) -> AbstractContextManager[BatchScoring]:
    return scorer.begin(prompts.asked_rows, prompts.all_requests)


def scored(
    scorer: CompletionScorer, scoring: BatchScoring, prompts: PromptBatch, rows: Any
) -> ScoredBatch:
    return scorer.samples(prompts, rows, scoring.scores(rows))


def score(scorer: CompletionScorer, prompts: PromptBatch, rows: Any) -> ScoredBatch:
    with begin(scorer, prompts) as scoring:
        return scored(scorer, scoring, prompts, rows)


def test_groups_scores_and_counts() -> None:
    with RewardScorer(RewardConfig(function="exact", max_unscored_frac=0.5)) as rewards:
        batch = score(
            scorer(rewards),
            # A ground truth that is an object cannot be compared: unscored, not 0.
            prompt_batch("12", {"not": "comparable"}),
            [[completion(1, 2), completion(1, 3)], [completion(1), completion(9, reason="abort")]],
        )
    assert [(s.group, s.score, s.reward) for s in batch.samples] == [(4, 1, 1), (4, 0, 0)]
    assert batch.samples[0].trajectory.prompt.token_ids_P.tolist() == [5, 6]
    assert (batch.num_generated, batch.num_unscored, batch.num_aborted) == (4, 1, 1)


def test_penalty_for_overlong_changes_the_reward_but_not_score() -> None:
    """Limit 8, buffer 4: 6 tokens are 2 into the buffer, -2/4 x factor 1."""
    with RewardScorer(RewardConfig(function="exact")) as rewards:
        punish = scorer(rewards, enable=True, buffer_length=4, penalty_factor=1.0)
        batch = score(
            punish, prompt_batch("111111"), [[completion(*[1] * 6), completion(*[1] * 4)]]
        )
    assert [(s.score, s.reward) for s in batch.samples] == [(1.0, 0.5), (0.0, 0.0)]


def test_too_many_unscored_samples_stop_the_run() -> None:
    with (
        RewardScorer(RewardConfig(function="exact")) as rewards,
        pytest.raises(RewardError, match="could not be scored"),
    ):
        score(scorer(rewards), prompt_batch({"no": "text"}), [[completion(1), completion(2)]])


TRUTHS = ("12", "3", {"not": "comparable"})
ANSWERS = st.tuples(
    st.sampled_from([(1, 2), (3,), (1, 2, 3, 4, 5, 6)]),
    st.sampled_from(["stop", "length", "abort"]),
)


@given(
    st.booleans(),
    st.sampled_from([0, 2]),
    st.lists(ANSWERS, min_size=9, max_size=9),
    st.sets(st.integers(0, 8)),
    st.randoms(use_true_random=False),
)
def test_the_order_in_which_samples_come_changes_nothing(
    greedy: bool,
    cache_size: int,
    answers: list[tuple[tuple[int, ...], str]],
    never_accepted: set[int],
    shuffle: random.Random,
) -> None:
    prompts = prompt_batch(*TRUTHS, greedy=greedy)
    keys = [key for request in prompts.all_requests for key in request.sample_keys]
    made = [
        Completion(*key, tokens, [-0.5] * len(tokens), [3] * len(tokens), reason)
        for key, (tokens, reason) in zip(keys, answers, strict=False)
    ]
    left = iter(made)
    rows = [[next(left) for _ in request.seeds] for request in prompts.all_requests]
    coming = [each for place, each in enumerate(made) if place not in never_accepted]
    shuffle.shuffle(coming)
    overlong = {"enable": True, "buffer_length": 4, "penalty_factor": 1.0}
    config = RewardConfig(function="exact", max_unscored_frac=1.0, cache_size=cache_size)
    with RewardScorer(config) as rewards:
        expected = score(scorer(rewards, **overlong), prompts, rows)
    with RewardScorer(config) as rewards:
        scoring_in = scorer(rewards, **overlong)
        with begin(scoring_in, prompts) as scoring:
            for completion in coming:
                scoring.accept(completion)
            found = scored(scoring_in, scoring, prompts, rows)
    # Arrays and all, to the last digit; trajectories are compared by identity.
    assert repr(found) == repr(expected)
    num_whole = sum(each.finish_reason != "abort" for each in made)
    assert scoring_in.tokenizer.num_decoded == num_whole  # pyright: ignore[reportAttributeAccessIssue]


def answers_of(prompts: PromptBatch, tokens: tuple[int, ...]) -> list[list[Completion]]:
    return [
        [Completion(*key, tokens, [0] * len(tokens), [0] * len(tokens), "stop") for key in keys]
        for keys in (request.sample_keys for request in prompts.all_requests)
    ]


def test_samples_are_judged_before_the_last_one_is_generated(tmp_path: Path) -> None:
    """In processes of their own; what was replaced since it was accepted is judged anew."""
    judged = tmp_path / "judged"
    judged.touch()
    file = tmp_path / "own.py"
    file.write_text(
        "def compute_score(solution_str, ground_truth, **rest):\n"
        f"    with open({str(judged)!r}, 'a') as file: file.write(solution_str + ' ')\n"
        "    return float(solution_str == ground_truth)\n"
    )
    prompts = prompt_batch("1", "2", "3")
    first = answers_of(prompts, (1,))
    *early, last = [each for row in first for each in row]
    with RewardScorer(RewardConfig(function=str(file), num_workers=1)) as rewards:
        scoring_in = scorer(rewards)
        with begin(scoring_in, prompts) as scoring:
            for completion in early:
                scoring.accept(completion)
            wait_for(lambda: judged.read_text() == "1 " * len(early), "all but the last", 600.0)
            scoring.accept(last)
            again = completion_of(first[1][0], 2)
            rows = [first[0], [again, first[1][1]], first[2]]
            found = scored(scoring_in, scoring, prompts, rows)
    assert [sample.score for sample in found.samples] == [1, 1, 1, 0, 0, 0]
    assert judged.read_text().split() == ["1"] * 6 + ["2"]


def completion_of(completion: Completion, *tokens: int) -> Completion:
    zeros = (0,) * len(tokens)
    name, index = completion.request_id, completion.sample_index
    return Completion(name, index, tokens, zeros, zeros, "stop")


def test_a_batch_that_is_given_up_ends_the_scoring_of_it(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef compute_score(**rest): time.sleep(600)\n")
    prompts = prompt_batch("1")
    with RewardScorer(RewardConfig(function=str(file), timeout_s=600)) as rewards:
        with begin(scorer(rewards), prompts) as scoring:
            scoring.accept(answers_of(prompts, (1,))[0][0])
        with pytest.raises(RewardError, match="closed"):
            score(scorer(rewards), prompts, answers_of(prompts, (1,)))


def test_judge_models_read_the_whole_batch_before_any_scoring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = prompt_batch("1", "2")
    rows = answers_of(prompts, (1,))
    asked: list[int] = []

    def scores(_, texts: list[str]) -> list[float]:
        asked.append(len(texts))
        return [float(place) for place in range(len(texts))]

    model: Any = SimpleNamespace(scores=scores)
    with RewardScorer(RewardConfig(function="exact")) as rewards:
        # The reward of the role `reward`, without one.
        monkeypatch.setattr(rewards, "_judge", lambda sample: Score(sample.model_score))
        digits = Digits()
        judging = CompletionScorer(rewards, digits, judges=Judges(model))  # pyright: ignore[reportArgumentType]
        with begin(judging, prompts) as scoring:
            for completion in (rows[1][1], rows[0][0], rows[1][0]):
                scoring.accept(completion)
            assert (digits.num_decoded, asked) == (3, [])
            found = scored(judging, scoring, prompts, rows)
    assert (digits.num_decoded, asked) == (4, [4])
    assert [sample.score for sample in found.samples] == [0, 1, 2, 3]
