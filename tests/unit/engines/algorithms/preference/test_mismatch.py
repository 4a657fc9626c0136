"""Prompts with answers to others: by hand, and that nothing is lost, doubled or too long."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.algorithms.preference.kto import mismatched
from engines.types import TokenBatch

Sequence = tuple[list[int], list[int]]
"""Prompt and answer; an answer is trained on, but for its tokens of 0."""


def batch_of(sequences: list[Sequence]) -> TokenBatch:
    return TokenBatch.from_sequences(
        [prompt + answer for prompt, answer in sequences],
        loss_mask=[[0.0] * len(p) + [float(t != 0) for t in answer] for p, answer in sequences],
    )


def exchanged(sequences: list[Sequence], max_length: int = 64) -> list[list[int]]:
    found = mismatched(batch_of(sequences), max_length)
    assert torch.equal(found.columns["loss_mask"] > 0, found.input_ids_T >= 50)
    return [ids.tolist() for ids in found.input_ids_T.split(found.lengths_B.tolist())]


def test_each_prompt_gets_the_next_answer() -> None:
    """A gap in an answer goes with it."""
    sequences = [([1, 2], [50, 51]), ([3], [60, 0, 61]), ([4, 5, 6], [70])]
    assert exchanged(sequences) == [[1, 2, 60, 0, 61], [3, 70], [4, 5, 6, 50, 51]]


def test_the_next_answer_is_to_another_prompt_where_there_is_one() -> None:
    """As in pairs that were taken apart: good and bad answers to one prompt are neighbours."""
    sequences = [([1], [50]), ([1], [51]), ([2], [60]), ([2], [61])]
    assert exchanged(sequences) == [[1, 60], [1, 61], [2, 50], [2, 51]]
    assert exchanged(sequences[:2]) == [[1, 51], [1, 50]]
    assert exchanged(sequences[:1]) == [[1, 50]]


def test_prompt_independent_preference_keeps_reference_point() -> None:
    """Of pairs, a policy that likes every good answer by as much as it dislikes every bad one."""
    sequences = [([n], [50 + good]) for n in range(1, 7) for good in (1, 0)]
    likes = {50: -2.0, 51: 2.0}
    found = exchanged(sequences)
    assert sum(likes[answer] for _, answer in found) == 0.0


def test_a_sequence_without_an_answer_stays_and_gives_none() -> None:
    sequences = [([1], [50]), ([2, 3], []), ([4], [70])]
    assert exchanged(sequences) == [[1, 70], [2, 3], [4, 50]]


def test_an_answer_that_does_not_fit_loses_its_end() -> None:
    sequences = [([1, 2, 3, 4], [50]), ([5], [60, 61, 62])]
    assert exchanged(sequences, max_length=5) == [[1, 2, 3, 4, 60], [5, 50]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=4),
            st.lists(st.integers(50, 52), min_size=0, max_size=4),
        ),
        min_size=1,
        max_size=7,
    )
)
def test_prompts_stay_and_each_answer_is_given_once(sequences: list[Sequence]) -> None:
    """To a prompt with most of the answers as few of its own as any deal leaves it."""
    numbered = [
        (prompt, [100 * index + 50 + token for token in answer])
        for index, (prompt, answer) in enumerate(sequences)
    ]
    found = exchanged(numbered, max_length=8)
    dealt = [ids[len(prompt) :] for (prompt, _), ids in zip(numbered, found, strict=True)]
    assert [ids[: len(p)] for (p, _), ids in zip(numbered, found, strict=True)] == [
        prompt for prompt, _ in numbered
    ]
    assert sorted(dealt) == sorted(answer for _, answer in numbered)
    assert all(bool(given) == bool(own) for given, (_, own) in zip(dealt, numbered, strict=True))
    asked = {answer[0]: tuple(prompt) for prompt, answer in numbered if answer}
    num_of = Counter(asked.values())
    num_own = Counter(
        tuple(prompt)
        for (prompt, _), given in zip(numbered, dealt, strict=True)
        if given and asked[given[0]] == tuple(prompt)
    )
    for prompt, num in num_of.items():
        assert num_own[prompt] == max(0, 2 * num - len(asked))


def test_mismatched_batch_drops_columns_of_other_tokens() -> None:
    batch = batch_of([([1], [50]), ([2], [60])]).with_columns(ref_logprobs=torch.ones(4))
    found = mismatched(batch, 64)
    assert set(found.columns) == {"loss_mask"}
    assert found.rows == {}
    assert found.lengths_B.tolist() == pytest.approx([2, 2])
