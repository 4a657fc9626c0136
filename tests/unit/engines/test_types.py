"""Requests for some samples, and samples that are put together from what was cut short."""

from engines.types import Completion, RolloutRequest, SamplingParams

REQUEST = RolloutRequest("r", (1, 2), SamplingParams(9), (10, 11, 12), turn=2, session="s")


def partial(index: int, *ids: int, version: int = 1, reason: str = "abort") -> Completion:
    logprobs, versions = tuple(-float(token) for token in ids), (version,) * len(ids)
    return Completion("r", index, ids, logprobs, versions, reason)


def test_some_samples_keep_their_names_seeds_and_beginnings() -> None:
    assert REQUEST.sample_keys == (("r", 0), ("r", 1), ("r", 2))
    some = REQUEST.select([2, 0])
    assert (some.seeds, some.sample_indices, some.prefixes) == ((12, 10), (2, 0), ())
    assert (some.turn, some.session, some.draw_offsets) == (2, "s", ())
    assert some.select([0]).seeds == (10,)
    assert REQUEST.select([0, 1, 2]).sample_keys == REQUEST.sample_keys


def test_what_was_cut_twice_goes_on_behind_both_pieces() -> None:
    once = REQUEST.behind([partial(2, 5, 6), partial(1)])
    assert (once.seeds, once.sample_indices) == ((12, 11), (2, 1))
    assert (once.prefixes, once.draw_offsets) == (((5, 6), ()), (2, 0))
    twice = once.behind([partial(2, 7)])
    assert (twice.seeds, twice.prefixes, twice.draw_offsets) == ((12,), ((5, 6, 7),), (3,))
    assert (twice.prefix(0), twice.draw_offset(0), twice.sample_index(0)) == ((5, 6, 7), 3, 2)


def test_an_offset_of_the_prompt_stays_in_front_of_the_prefix() -> None:
    offset = RolloutRequest("r", (1, 2, 3), SamplingParams(9), (10,), draw_offsets=(1,))
    assert offset.behind([partial(0, 5, 6)]).draw_offsets == (3,)


def test_pieces_make_one_sample_with_the_end_of_the_last() -> None:
    whole = partial(2, 5, 6).then(partial(2, 7, version=3, reason="stop"))
    assert whole == Completion("r", 2, (5, 6, 7), (-5.0, -6.0, -7.0), (1, 1, 3), "stop")
