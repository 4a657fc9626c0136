"""The waiting line and the two planning functions, on plain integers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.rollout.transformers.running_batch import fill_holes, prefill_chunks
from engines.rollout.transformers.scheduler import Sample, Scheduler
from engines.types import RolloutRequest, SamplingParams


def samples_of(name: str, num_samples: int) -> list[Sample]:
    request = RolloutRequest(name, (1, 2), SamplingParams(4), tuple(range(num_samples)))
    return [Sample(request, place, 0) for place in range(num_samples)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_prefill_chunks_cover_everything_within_budget(lengths: list[int], budget: int) -> None:
    chunks = prefill_chunks(lengths, budget)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        longest = max(lengths[i] for i in chunk)
        assert len(chunk) * longest <= budget or len(chunk) == 1


@settings(deadline=None)
@given(
    st.integers(0, 30).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1) if n else st.nothing()))
    )
)
def test_fill_holes_keeps_every_other_row_once(case: tuple[int, set[int]]) -> None:
    num_rows, leaving = case
    order, movers, holes = fill_holes(num_rows, leaving)
    assert sorted(order) == [row for row in range(num_rows) if row not in leaving]
    rows = list(range(num_rows))
    for mover, hole in zip(movers, holes, strict=True):
        rows[hole] = rows[mover]
    assert rows[: len(order)] == order
    assert not set(movers) & set(holes)  # so the copies may happen in any order


def test_samples_of_a_request_that_join_together_share_a_prefix() -> None:
    scheduler = Scheduler(max_num_sequences=5)
    first, second = samples_of("a", 3), samples_of("b", 4)
    scheduler.add([*first, *second])
    prefixes = scheduler.next_prefixes(num_running=0)
    assert [list(prefix.samples) for prefix in prefixes] == [first, second[:2]]
    assert list(scheduler.waiting) == second[2:]


def test_equal_prompts_of_two_requests_do_not_mix() -> None:
    scheduler = Scheduler(max_num_sequences=8)
    scheduler.add([*samples_of("a", 1), *samples_of("a", 1)])
    assert len(scheduler.next_prefixes(num_running=0)) == 2


def test_nobody_joins_until_an_eighth_of_the_batch_is_free() -> None:
    scheduler = Scheduler(max_num_sequences=16)
    scheduler.add(samples_of("a", 3))
    assert scheduler.next_prefixes(num_running=15) == []
    assert len(scheduler.next_prefixes(num_running=14)[0].samples) == 2
    assert scheduler.next_prefixes(num_running=16) == []


def test_samples_sent_back_go_first_and_alone() -> None:
    scheduler = Scheduler(max_num_sequences=8)
    new, old = samples_of("a", 1), samples_of("b", 2)
    for sample in old:
        sample.token_ids.append(7)
    scheduler.add(new)
    scheduler.send_back(old)
    prefixes = scheduler.next_prefixes(num_running=0)
    assert [list(prefix.token_ids) for prefix in prefixes] == [[1, 2, 7], [1, 2, 7], [1, 2]]
    assert [prefix.shared for prefix in prefixes] == [False, False, True]


def test_remove_takes_samples_out_of_the_line() -> None:
    scheduler = Scheduler(max_num_sequences=8)
    first, second = samples_of("a", 2), samples_of("b", 1)
    scheduler.add([*first, *second])
    assert scheduler.remove(lambda s: s.request.request_id == "a") == first
    assert list(scheduler.waiting) == second


def test_versions_are_stamped_where_they_change() -> None:
    (sample,) = samples_of("a", 1)
    assert not sample.append(4, -1.0)
    assert not sample.append(5, -2.0)
    sample.stamp(1)
    sample.stamp(2)  # nothing new was sampled
    assert not sample.append(6, -3.0)
    completion = sample.completion("length", version=3)
    assert completion.policy_versions.tolist() == [1, 1, 3]
    assert completion.token_ids.tolist() == [4, 5, 6]
    assert completion.logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_prefixed_sample_counts_prefix_and_returns_new_tokens() -> None:
    request = RolloutRequest(
        "a", (1, 2), SamplingParams(4), (8, 9), prefixes=((), (4, 5)), sample_indices=(6, 3)
    )
    whole, rest = (Sample(request, place, 0) for place in range(2))
    assert (whole.num_tokens, whole.stream_origin) == (2, 2)
    assert (rest.num_tokens, rest.stream_origin) == (4, 2)
    assert not rest.append(6, -1.0)
    assert rest.append(7, -2.0)  # the fourth of four
    completion = rest.completion("length", version=5)
    assert (completion.sample_index, completion.token_ids.tolist()) == (3, [6, 7])
    assert completion.logprobs.tolist() == [-1.0, -2.0]
    assert completion.policy_versions.tolist() == [5, 5]
    offset = RolloutRequest("a", (1, 2, 4, 5), SamplingParams(2), (9,), draw_offsets=(2,))
    assert Sample(offset, 0, 0).stream_origin == 2
