"""What the service does when replicas die, hang or say wrong things: engines made to fail."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import ReplicaLostError, RolloutError, WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.replica_pool import TRANSITIONS, ReplicaPool, ReplicaState, RestartPolicy
from engines.rollout.service import RolloutService
from engines.types import Completion, RolloutRequest, SamplingParams
from engines.weight_sync.base import WeightDigest
from engines.weight_sync.buckets import CastStream
from engines.weight_sync.in_process import InProcessTransport
from infra.errors import DeadlineError

GUIDE = Path(__file__).resolve().parents[4] / "docs/guides/recover.md"


class Spare:
    """Starts further engines of the lab; the numbers of the replicas that it replaced."""

    def __init__(self, new: Callable[[], RolloutEngine]) -> None:
        self.new, self.replaced = new, []

    async def restart(self, place: int, lost: RolloutEngine) -> RolloutEngine:
        self.replaced.append(place)
        return self.new()


@contextmanager
def serving(
    lab,
    *engines: RolloutEngine,
    timeout_s: float = 600.0,
    max_num_restarts: int = 2,
    silence_s: float = 60.0,
    **options: Any,
) -> Iterator[tuple[RolloutService, Spare]]:
    spare = Spare(lab.bare_engine)
    restarts = RestartPolicy(spare.restart, max_num_restarts, silence_s)
    with closing(RolloutService(engines, timeout_s, restarts=restarts, **options)) as service:
        yield service, spare


def publish(service: RolloutService, model: torch.nn.Module, version: int = 0, probe=None):
    """One transport carries to one replica here, so these tests publish to one."""

    def send(transport: InProcessTransport) -> WeightDigest:
        return transport.send((name, p.detach()) for name, p in model.named_parameters())

    return service.sync(lambda _: InProcessTransport("float32", 600.0), send, version, probe)


def dies_after(engine: RolloutEngine, num_samples: int) -> RolloutEngine:
    """It gives so many samples, and is dead from then on."""
    whole = engine.generate

    async def generate(requests):
        async with asyncio.timeout(60):
            count = 0
            async for completion in whole(requests):
                if count == num_samples:
                    raise ReplicaLostError("replica 0: its process died")
                count += 1
                yield completion

    engine.generate = generate
    return engine


def hangs(engine: RolloutEngine) -> RolloutEngine:
    """It gives no sample and answers no question, as a stopped process does."""

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def generate(requests):
        await never()
        yield

    engine.generate, engine.health = generate, never
    return engine


@pytest.mark.parametrize("routing", ["by_place", "least_loaded"])
def test_fault_row_5_successor_resamples_a_dead_replicas_share(lab, routing: str) -> None:
    requests = lab.requests(5, 3)
    with serving(lab, lab.bare_engine()) as (service, _):
        publish(service, lab.model)
        expected = service.generate(requests)
    with serving(lab, dies_after(lab.bare_engine(), 4), routing=routing) as (service, spare):
        publish(service, lab.model)
        found = service.generate(requests)
        assert service.num_restarts == len(spare.replaced) == 1
        assert service.states() == [ReplicaState.HEALTHY]
    # Another batch rounds differently, by less than a draw notices here.
    assert [[c.token_ids.tolist() for c in row] for row in found] == [
        [c.token_ids.tolist() for c in row] for row in expected
    ]
    if routing == "by_place":
        assert found == expected


@pytest.mark.parametrize("routing", ["by_place", "least_loaded"])
def test_a_sample_is_handed_over_once_whichever_replica_was_lost(lab, routing: str) -> None:
    requests = lab.requests(5, 3)
    found: list[Completion] = []
    with serving(lab, dies_after(lab.bare_engine(), 4), routing=routing) as (service, spare):
        publish(service, lab.model)
        rows = service.generate(requests, found.append)
        assert spare.replaced == [0]
    assert sorted(map(id, found)) == sorted(id(each) for row in rows for each in row)


def test_fault_row_4_replica_silent_while_sampling_is_replaced(lab) -> None:
    with serving(lab, hangs(lab.bare_engine()), silence_s=1.0) as (service, spare):
        publish(service, lab.model)
        rows = service.generate(lab.requests(2, 2))
        assert {c.finish_reason for row in rows for c in row} <= {"stop", "length"}
        assert spare.replaced == [0]


def test_fault_row_6_the_number_of_restarts_is_bounded_and_told(lab) -> None:
    with serving(lab, dies_after(lab.bare_engine(), 0), max_num_restarts=2) as (service, spare):
        spare.new = lambda: dies_after(lab.bare_engine(), 0)
        publish(service, lab.model)
        with pytest.raises(ReplicaLostError, match="its process died") as caught:
            service.generate(lab.requests(1, 1))
        assert spare.replaced == [0, 0]
        assert "rollout.max_num_restarts: 2 are used up" in caught.value.__notes__[0]


def test_a_refused_request_is_no_loss(lab) -> None:
    with serving(lab, lab.bare_engine()) as (service, spare):
        publish(service, lab.model)
        unknown = RolloutRequest("x", (10**6,), SamplingParams(1), (0,))
        with pytest.raises(RolloutError, match="x"):
            service.generate([unknown])
        assert spare.replaced == []
        assert service.generate(lab.requests(1, 1))


def test_a_sync_replaces_who_died_in_it(lab) -> None:
    engine = lab.bare_engine()

    async def die(source, version):
        raise ReplicaLostError("replica 0: its process died")

    engine.update_weights = die
    with serving(lab, engine) as (service, spare):
        publish(service, lab.model, 5)
        assert spare.replaced == [0]
        assert [health.version for health in service.health()] == [5]


def test_who_comes_late_must_get_what_was_published(build_lab) -> None:
    """A trainer that went on would give it other weights under the same number."""
    lab = build_lab()
    with serving(lab, dies_after(lab.bare_engine(), 0)) as (service, _):
        publish(service, lab.model, 3)
        with torch.no_grad():
            next(lab.model.parameters()).add_(1e-3)
        with pytest.raises(WeightSyncError, match="version 3 was published as .* holds .* now"):
            service.generate(lab.requests(1, 1))


def test_deadline_aborts_samples_and_the_next_batch_continues(build_lab) -> None:
    lab = build_lab(eos_token_id=None, max_position_embeddings=8192)
    short = lab.requests(1, 1, max_new_tokens=2)
    (long,) = lab.requests(1, 2, max_new_tokens=8000)
    long = RolloutRequest("long", long.prompt_ids, long.sampling, long.seeds)
    with serving(lab, lab.bare_engine(), timeout_s=2.0) as (service, spare):
        publish(service, lab.model)
        finished: list[Completion] = []
        rows = service.generate([*short, long], finished.append)
        assert finished == rows[0]
        assert [c.finish_reason for c in rows[0]] == ["length"]
        assert [c.finish_reason for c in rows[1]] == ["abort", "abort"]
        assert all(len(c.token_ids) == len(c.logprobs) > 2 for c in rows[1])
        assert spare.replaced == []
        assert [c.token_ids.tolist() for c in service.generate(short)[0]] == [
            rows[0][0].token_ids.tolist()
        ]
        with pytest.raises(DeadlineError, match="one sample to be finished"):
            service.generate([long])


PROMPTS = [PromptRequest(f"r{at}", tuple(range(4, 9 + at)), 2, num_top=3) for at in range(7)]


def dies_when_asked(engine: RolloutEngine) -> RolloutEngine:
    async def prompt_logprobs(requests):
        raise ReplicaLostError("replica 0: its process died")

    engine.prompt_logprobs = prompt_logprobs
    return engine


@pytest.mark.parametrize("routing", ["by_place", "least_loaded"])
def test_one_that_dies_is_replaced_given_its_weights_and_asked(lab, routing: str) -> None:
    dying = dies_when_asked(lab.bare_engine())
    with serving(lab, dying, routing=routing) as (service, spare):
        publish(service, lab.model)
        found = service.prompt_logprobs(PROMPTS)
        assert spare.replaced == [0]
    expected = asyncio.run(lab.engine().prompt_logprobs(PROMPTS))
    for said, other in zip(found, expected, strict=True):
        assert said.request_id == other.request_id
        torch.testing.assert_close(said.logprobs_N, other.logprobs_N, rtol=0, atol=1e-5)


def test_missing_logprobs_at_the_deadline_are_an_error(lab) -> None:
    engine = lab.bare_engine()

    async def prompt_logprobs(requests):
        await asyncio.sleep(600)

    engine.prompt_logprobs = prompt_logprobs
    with serving(lab, engine, timeout_s=0.5) as (service, spare):
        publish(service, lab.model)
        with pytest.raises(DeadlineError, match="logprobs of 7 sequences"):
            service.prompt_logprobs(PROMPTS)
        assert spare.replaced == []


class Suspicious:
    """A probe that finds what it is told to find."""

    def __init__(self, problem: str | None) -> None:
        self.problem, self.seen = problem, []

    def request(self, place: int, version: int) -> RolloutRequest:
        return RolloutRequest(f"probe {place}", (4, 5, 6), SamplingParams(2), (1,))

    def check(self, requests, found: list[Completion]) -> None:
        assert found
        self.seen += [completion.request_id for completion in found]
        if self.problem:
            raise WeightSyncError(self.problem)


def test_nothing_is_sampled_before_the_probe_has_passed(lab) -> None:
    with serving(lab, lab.bare_engine()) as (service, _):
        probe = Suspicious("head of the weights before")
        with pytest.raises(WeightSyncError, match="head of the weights before"):
            publish(service, lab.model, probe=probe)
        assert probe.seen == ["probe 0"]
        assert service.states() == [ReplicaState.STALE]
        with pytest.raises(RolloutError, match="no confirmed weights"):
            service.generate(lab.requests(1, 1))
        publish(service, lab.model, 1, Suspicious(None))
        assert service.generate(lab.requests(1, 1))


def test_a_replica_in_the_place_of_another_is_probed_too(lab) -> None:
    probe = Suspicious(None)
    with serving(lab, dies_after(lab.bare_engine(), 2)) as (service, _):
        publish(service, lab.model, probe=probe)
        service.generate(lab.requests(3, 1))
        assert probe.seen == ["probe 0", "probe 0"]


def gives_up(*_: Any) -> Any:
    """As an engine whose library does not answer by the engine's own deadline."""
    raise DeadlineError("the library to answer", 1.0)


@pytest.mark.parametrize("call", ["wake_up", "update_weights", "finish_update", "generate"])
def test_one_whose_own_deadline_passes_in_a_sync_is_replaced(lab, call: str) -> None:
    engine, probe = lab.bare_engine(), Suspicious(None)

    async def late(*_: Any) -> Any:
        gives_up()

    setattr(engine, call, gives_up if call == "generate" else late)
    with serving(lab, engine) as (service, spare):
        publish(service, lab.model, 5, probe)
        assert spare.replaced == [0]
        assert probe.seen == ["probe 0"]
        assert [health.version for health in service.health()] == [5]
        assert service.generate(lab.requests(2, 1))


def test_replica_missing_its_deadline_to_sleep_is_replaced(lab) -> None:
    engine = lab.bare_engine()

    async def late(*_: Any) -> Any:
        gives_up()

    with serving(lab, engine) as (service, spare):
        publish(service, lab.model)
        engine.sleep = late
        service.sleep()
        assert spare.replaced == [0]


class EachReads:
    """A delivery from which every replica reads all weights by itself."""

    checksum_method = "xxh3"

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = [(name, p.detach()) for name, p in model.named_parameters()]
        self.sources: list[EachReads] = []

    def __call__(self, num_workers: Sequence[int]) -> "EachReads":
        self.sources = [self] * len(num_workers)
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights)

    def send(self) -> WeightDigest:
        stream = CastStream(self.tensors(), torch.float32)
        for _ in stream:
            pass
        return stream.sent

    def stop(self) -> None:
        return


def test_replica_restarted_during_a_probe_syncs_before_serving(lab) -> None:
    """The others take their time, and the slot is up again before the probe has ended."""
    dead, slow = lab.bare_engine(), lab.bare_engine()

    async def dies(requests):
        raise ReplicaLostError("replica 0: its process died")
        yield

    whole = slow.generate

    async def takes_its_time(requests):
        await asyncio.sleep(0.3)
        async for completion in whole(requests):
            yield completion

    dead.generate, slow.generate = dies, takes_its_time
    with serving(lab, dead, slow) as (service, spare):
        service.sync(EachReads(lab.model), lambda each: each.send(), 5, Suspicious(None))
        assert spare.replaced == [0]
        assert service.states() == [ReplicaState.STALE, ReplicaState.HEALTHY]
        assert service.generate(lab.requests(4, 1))
        assert {health.version for health in service.health()} == {5}


def test_a_deadline_of_an_engine_does_not_end_the_watch(lab) -> None:
    engine = hangs(lab.bare_engine())

    async def late(*_: Any) -> Any:
        gives_up()

    engine.health = late
    with serving(lab, engine, silence_s=1.0) as (service, spare):
        publish(service, lab.model)
        assert service.generate(lab.requests(1, 1))
        assert spare.replaced == [0]


def test_there_is_no_step_beside_the_table(lab) -> None:
    pool = ReplicaPool([lab.bare_engine()], None)
    (slot,) = pool.slots
    for before in ReplicaState:
        for after in ReplicaState:
            slot.state = before
            if before is after or (before, after) in TRANSITIONS:
                pool.move(slot, after)
                assert slot.state is after
            else:
                with pytest.raises(ValueError, match="no step"):
                    pool.move(slot, after)


def test_the_guide_shows_the_table() -> None:
    rows = re.findall(r"^\| `([A-Z]+)` \| `([A-Z]+)` \| (.+) \|$", GUIDE.read_text("utf-8"), re.M)
    assert rows == [(a.value, b.value, why) for (a, b), why in TRANSITIONS.items()]
