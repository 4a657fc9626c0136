"""Who sends which parts of the weights: by hand, and over random cuts and orders."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import WeightSyncError
from engines.weight_places import WeightPlace
from engines.weight_sync.sharded import SendPlan, make_plan


def rows(name: str, start: int, end: int, of: int) -> WeightPlace:
    return WeightPlace(name, (of, 2), (start, 0), (end - start, 2))


def names(plan: SendPlan) -> list[set[str]]:
    return [set(each.weights) for each in plan.rounds]


def test_weights_share_a_round_while_they_fit() -> None:
    # a and b fill 24 of 24 bytes, c is larger than a round, d is held by rank 1 alone.
    owned = [
        [rows("a", 0, 1, 2), rows("b", 0, 1, 1), rows("c", 0, 6, 10)],
        [rows("a", 1, 2, 2), rows("c", 6, 10, 10), rows("d", 0, 1, 1)],
    ]
    plan = make_plan(owned, {"a": 16, "b": 8, "c": 80, "d": 8}, round_bytes=24)
    assert names(plan) == [{"a", "b"}, {"c"}, {"d"}]
    assert [[len(own) for own in each.parts] for each in plan.rounds] == [[2, 1], [1, 1], [0, 1]]
    assert plan.rounds[1].weights == {"c": (10, 2)}
    assert plan.senders == [0, 1]
    assert SendPlan.from_json(plan.to_json()) == plan


def test_what_a_rank_comes_back_to_is_one_round() -> None:
    """Rank 0 reads q and k head by head; rank 1 reads k before v."""
    q, k, v = ([rows(name, i, i + 1, 2) for i in range(2)] for name in "qkv")
    plan = make_plan([[q[0], k[0], q[1], k[1]], [*v]], dict.fromkeys("qkv", 8), round_bytes=8)
    assert names(plan) == [{"q", "k"}, {"v"}]


def test_pipeline_stages_follow_each_other() -> None:
    first, second = [rows("a", 0, 2, 2), rows("b", 0, 2, 2)], [rows("c", 0, 2, 2)]
    plan = make_plan([first, second], dict.fromkeys("abc", 8), round_bytes=8)
    assert names(plan) == [{"a"}, {"b"}, {"c"}]
    assert make_plan([[], first], dict.fromkeys("ab", 8), 8).senders == [1]


def test_a_weight_of_which_a_part_is_missing_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="a: the ranks hold 2 of its 4 values"):
        make_plan([[rows("a", 0, 1, 2)], []], {"a": 16}, 64)


def test_orders_that_contradict_each_other_are_refused() -> None:
    one, other = [(rows("a", i, i + 1, 2), rows("b", i, i + 1, 2)) for i in range(2)]
    with pytest.raises(WeightSyncError, match="contradict each other: a, b"):
        make_plan([list(one), list(reversed(other))], {"a": 16, "b": 16}, 64)


@given(st.data())
def test_every_part_is_planned_once_in_its_ranks_order(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    round_bytes = data.draw(st.integers(1, 200))
    owned: list[list[WeightPlace]] = [[] for _ in range(num_ranks)]
    for number, size in enumerate(sizes):
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
        for start, end in zip([0, *cuts], [*cuts, size], strict=True):
            if start < end:
                rank = data.draw(st.integers(0, num_ranks - 1))
                owned[rank].append(rows(f"w{number}", start, end, size))
    num_bytes = {f"w{number}": 8 * size for number, size in enumerate(sizes)}
    plan = make_plan(owned, num_bytes, round_bytes)
    for rank, places in enumerate(owned):
        assert [place for each in plan.rounds for place in each.parts[rank]] == places
    planned = [name for each in plan.rounds for name in each.weights]
    assert sorted(planned) == sorted(num_bytes)
    for each in plan.rounds:
        assert len(each.weights) == 1 or sum(num_bytes[n] for n in each.weights) <= round_bytes
        assert all(math.prod(w) for w in each.weights.values())
