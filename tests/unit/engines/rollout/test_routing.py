"""Which place samples what, by hand; and what is asked for again when one is lost."""

from hypothesis import given
from hypothesis import strategies as st

from engines.rollout.collect import SampleLedger
from engines.rollout.replica_pool import ByPlace, LeastLoaded, Share
from engines.types import Completion, RolloutRequest, SamplingParams


def request(name: str, num_samples: int = 1, session: str | None = None) -> RolloutRequest:
    seeds = tuple(range(100, 100 + num_samples))
    return RolloutRequest(name, (1,), SamplingParams(4), seeds, session=session)


def done(name: str, index: int) -> Completion:
    return Completion(name, index, (1,), (-0.5,), (0,), "length")


def names(taken: list[tuple[int, Share]]) -> dict[int, list[str]]:
    return {place: [request.request_id for request in share.requests] for place, share in taken}


def test_by_place_is_request_i_at_place_i_mod_n() -> None:
    routing = ByPlace([request(str(i)) for i in range(7)], 3)
    assert names(routing.take({0: 0, 1: 0, 2: 0})) == {
        0: ["0", "3", "6"],
        1: ["1", "4"],
        2: ["2", "5"],
    }
    assert not routing.waiting


def test_a_share_without_its_replica_waits_for_one_that_is_idle() -> None:
    requests = [request(str(i)) for i in range(4)]
    routing = ByPlace(requests, 2)
    # Place 0 samples its own share first; beside it another would change the batch.
    assert names(routing.take({0: 0})) == {0: ["0", "2"]}
    assert routing.take({0: 2}) == []
    assert names(routing.take({0: 0})) == {0: ["1", "3"]}
    # Unless its own comes back before.
    routing = ByPlace(requests, 2)
    routing.take({0: 0})
    assert names(routing.take({0: 2, 1: 0})) == {1: ["1", "3"]}


def test_by_place_a_lost_share_is_sampled_again_whole() -> None:
    requests = [request("a", 2), request("b", 2)]
    routing, ledger = ByPlace(requests, 1), SampleLedger(requests)
    ((_, share),) = routing.take({0: 0})
    ledger.accept(done("a", 0))
    routing.lost(share, ledger)
    ((_, again),) = routing.take({0: 0})
    assert again == share
    for name in ("a", "b"):
        for index in (0, 1):
            ledger.accept(done(name, index))
    routing.lost(again, ledger)  # everything had arrived before it was lost
    assert not routing.waiting


def test_least_loaded_counts_what_is_in_flight() -> None:
    requests = [request("a", 4), request("b", 1), request("c", 1), request("d", 2)]
    routing = LeastLoaded(requests, {})
    assert names(routing.take({0: 1, 1: 0})) == {0: ["b", "c", "d"], 1: ["a"]}


def test_a_session_stays_where_it_was_while_there_is_a_replica() -> None:
    sessions: dict[str, int] = {}
    first = LeastLoaded([request("x"), request("turn 1", session="s")], sessions)
    assert names(first.take({0: 0, 1: 0})) == {0: ["x"], 1: ["turn 1"]}
    second = LeastLoaded([request("turn 2", session="s")], sessions)
    assert names(second.take({0: 0, 1: 99})) == {1: ["turn 2"]}
    third = LeastLoaded([request("turn 3", session="s")], sessions)
    assert third.take({}) == []
    assert names(third.take({0: 7})) == {0: ["turn 3"]}
    assert sessions == {"s": 0}


def test_least_loaded_resamples_only_missing_ones_with_own_seed() -> None:
    requests = [request("a", 3), request("b", 2)]
    routing, ledger = LeastLoaded(requests, {}), SampleLedger(requests)
    ((_, share),) = routing.take({0: 0})
    for name, index in (("a", 0), ("a", 2), ("b", 0), ("b", 1)):
        ledger.accept(done(name, index))
    routing.lost(share, ledger)
    ((_, again),) = routing.take({0: 0})
    assert [request.sample_keys for request in again.requests] == [(("a", 1),)]
    assert again.requests[0].seeds == (101,)


@given(
    sizes=st.lists(st.integers(1, 4), max_size=12),
    num_places=st.integers(1, 4),
    by_place=st.booleans(),
    losses=st.lists(st.booleans(), max_size=20),
)
def test_every_sample_is_asked_for_until_it_is_there(
    sizes: list[int], num_places: int, by_place: bool, losses: list[bool]
) -> None:
    """Whatever is lost after how much of it: in the end each sample is there, and once."""
    requests = [request(str(number), size) for number, size in enumerate(sizes)]
    ledger = SampleLedger(requests)
    routing = ByPlace(requests, num_places) if by_place else LeastLoaded(requests, {})
    fate = iter(losses)
    while routing.waiting:
        taken = routing.take(dict.fromkeys(range(num_places), 0))
        assert taken
        for _, share in taken:
            is_lost = next(fate, False)
            samples = [key for request in share.requests for key in request.sample_keys]
            for name, index in samples[: len(samples) // 2 if is_lost else None]:
                ledger.accept(done(name, index))
            if is_lost:
                routing.lost(share, ledger)
    assert ledger.num_missing == 0
    found = [[(c.request_id, c.sample_index) for c in row] for row in ledger.rows()]
    assert found == [[(str(n), i) for i in range(size)] for n, size in enumerate(sizes)]
