"""The service over real engines in this process, and over ones that fail on purpose."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.rollout.event_loop import EventLoopThread
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.replica_pool import ReplicaState
from engines.rollout.service import RolloutService
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightSource
from engines.weight_sync.in_process import InProcessTransport
from infra.errors import DeadlineError

TENSORS = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def serving(*engines) -> Iterator[RolloutService]:
    with closing(RolloutService(engines, timeout_s=600.0)) as service:
        yield service


def publish(service: RolloutService, model: torch.nn.Module, version: int):
    """To every replica of this process, one transport each, as a fan-out."""
    return service.sync(Fan, lambda fan: fan.send_all(model.named_parameters()), version)


def one_transport(num_workers: Sequence[int]) -> InProcessTransport:
    assert list(num_workers) == [1]
    return InProcessTransport("float32", 600.0)


class Fan:
    """In-process transports to several replicas; each gets all of the weights."""

    def __init__(self, num_workers: Sequence[int]) -> None:
        self._each = [InProcessTransport("float32", 600.0) for _ in num_workers]
        self.sources = tuple(self._each)

    def send_all(self, tensors):
        held = [(name, tensor.detach()) for name, tensor in tensors]
        senders = [threading.Thread(target=one.send, args=(iter(held),)) for one in self._each[1:]]
        for sender in senders:
            sender.start()
        sent = self._each[0].send(iter(held))
        for sender in senders:
            sender.join()
        return sent

    def stop(self) -> None:
        for one in self._each:
            one.stop()


def test_replicas_share_the_requests_and_come_back_as_one(lab) -> None:
    requests = lab.requests(7, 2)
    with serving(lab.bare_engine()) as alone:
        publish(alone, lab.model, 3)
        expected = alone.generate(requests)
    engines = [lab.bare_engine() for _ in range(3)]
    asked: list[list[str]] = [[], [], []]
    for engine, seen in zip(engines, asked, strict=True):
        inner = engine.generate

        def spy(part, inner=inner, seen=seen):
            seen += [request.request_id for request in part]
            return inner(part)

        engine.generate = spy
    with serving(*engines) as service:
        report = publish(service, lab.model, 3)
        found = service.generate(requests)
        assert [health.version for health in service.health()] == [3, 3, 3]
    assert report.version == 3
    assert [[c.token_ids.tolist() for c in row] for row in found] == [
        [c.token_ids.tolist() for c in row] for row in expected
    ]
    ids = [request.request_id for request in requests]
    assert asked == [ids[0::3], ids[1::3], ids[2::3]]


def test_samples_are_delivered_as_they_finish_by_waiting_thread(build_lab) -> None:
    lab = build_lab(eos_token_id=None)
    engine, other = lab.bare_engine(), lab.bare_engine()
    may_end = threading.Event()
    whole = other.generate

    async def holds_back(requests):
        async for completion in whole(requests):
            while not may_end.is_set():
                await asyncio.sleep(0.001)
            yield completion

    other.generate = holds_back
    found: list[Completion] = []

    def receive(completion: Completion) -> None:
        assert threading.current_thread() is threading.main_thread()
        found.append(completion)
        if len(found) == 6:
            # Three of five requests: all that the first replica has.
            may_end.set()

    with serving(engine, other) as service:
        publish(service, lab.model, 3)
        rows = service.generate(lab.requests(5, 2), receive)
    assert may_end.is_set()
    assert {c.request_id for c in found[:6]} == {row[0].request_id for row in rows[0::2]}
    assert sorted(map(id, found)) == sorted(id(each) for row in rows for each in row)


def test_receiver_error_ends_the_batch_and_frees_its_ids(build_lab) -> None:
    lab = build_lab(eos_token_id=None, max_position_embeddings=4096)
    (long,) = lab.requests(1, 2, max_new_tokens=4000)
    long = replace(long, request_id="long")
    received: list[Completion] = []

    def fail(completion: Completion) -> None:
        received.append(completion)
        raise ZeroDivisionError("the reward")

    for routing in ("by_place", "least_loaded"):
        engines = [lab.bare_engine(max_num_sequences=4) for _ in range(2)]
        with closing(RolloutService(engines, 600.0, routing)) as service:
            publish(service, lab.model, 0)
            with pytest.raises(ZeroDivisionError, match="the reward"):
                service.generate(
                    [*lab.requests(4, 2, max_new_tokens=2), long, long_too(long)], fail
                )
            assert [health.num_running for health in service.health()] == [0, 0]
            # The ids are free again, and so are the replicas.
            assert service.generate(lab.requests(4, 2, max_new_tokens=2))
            service.sleep()
    assert len(received) == 2


def long_too(request: RolloutRequest) -> RolloutRequest:
    return replace(request, request_id="long too")


def test_one_replica_that_holds_something_else_stops_all(lab) -> None:
    engines = [lab.bare_engine(), lab.bare_engine()]
    receive = engines[1].update_weights

    class Damaging:
        checksum_method = "xxh3"

        def __init__(self, source: WeightSource) -> None:
            self.source = source

        def of_worker(self, worker: int) -> "Damaging":
            return self

        def tensors(self):
            for number, (name, tensor) in enumerate(self.source.tensors()):
                yield name, tensor + 1e-3 if number == 2 else tensor

    engines[1].update_weights = lambda source, version: receive(Damaging(source), version)
    with serving(*engines) as service:
        with pytest.raises(WeightSyncError, match="version 0: sent .* replica 1 holds"):
            publish(service, lab.model, 0)
        for engine in engines:
            assert engine.version == -1
        with pytest.raises(RolloutError, match="no confirmed weights"):
            service.generate(lab.requests(2, 1))


def test_the_reason_of_a_replica_is_told_not_that_it_is_gone(lab) -> None:
    engine = lab.bare_engine()
    with serving(engine) as service, pytest.raises(WeightSyncError, match="were not sent, first"):
        service.sync(
            one_transport,
            lambda transport: transport.send(iter(list(lab.model.named_parameters())[:-1])),
            0,
        )


def held_bytes() -> int:
    """Of every tensor of this process, memory that several look at counted once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in TENSORS]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_sleeping_engines_hold_no_weights_or_cache_until_a_sync(lab) -> None:
    before = held_bytes()
    model_bytes = sum(p.nbytes for p in lab.model.parameters())
    engines = [lab.bare_engine(), lab.bare_engine()]
    with serving(*engines) as service:
        publish(service, lab.model, 3)
        expected = service.generate(lab.requests(3, 2))
        assert held_bytes() - before >= 2 * model_bytes
        service.sleep()
        kept = [b for e in engines for _, b in e._model._model.named_buffers()]
        assert sum(each.nbytes for each in kept) < model_bytes / 50
        # A few numbers per row, at a fixed place.
        kept += [c for e in engines for c in (e._batch._ints_7M, e._batch._floats_3M)]
        assert held_bytes() - before <= sum(each.nbytes for each in kept)
        assert [health.can_serve for health in service.health()] == [False, False]
        assert service.states() == [ReplicaState.STALE] * 2
        service.sleep()
        with pytest.raises(RolloutError, match="no confirmed weights"):
            service.generate(lab.requests(1, 1))
        publish(service, lab.model, 3)
        assert service.generate(lab.requests(3, 2)) == expected


def test_a_trainer_that_fails_while_it_sends_is_told(lab) -> None:
    def fail(_: InProcessTransport):
        raise ZeroDivisionError("the trainer")

    with serving(lab.bare_engine()) as service:
        with pytest.raises(ZeroDivisionError):
            service.sync(one_transport, fail, 0)
        publish(service, lab.model, 1)
        assert service.generate(lab.requests(1, 1))


def test_call_to_all_replicas_waits_for_all_before_it_raises(lab) -> None:
    engines = [lab.bare_engine(), lab.bare_engine()]
    ended: list[str] = []

    async def refuse(request_ids: Sequence[str] | None = None) -> None:
        raise RolloutError("cannot abort")

    async def take_time(request_ids: Sequence[str] | None = None) -> None:
        await asyncio.sleep(0.2)
        ended.append("slow")

    engines[0].abort, engines[1].abort = refuse, take_time
    with serving(*engines) as service:
        with pytest.raises(RolloutError, match="cannot abort"):
            service.abort()
        ended_by_then = list(ended)
        del engines[0].abort, engines[1].abort
    assert ended_by_then == ["slow"]


def test_service_reports_health_and_aborts_while_generating(build_lab) -> None:
    lab = build_lab(eos_token_id=None, max_position_embeddings=4096)
    with serving(lab.bare_engine()) as service:
        publish(service, lab.model, 0)
        requests = lab.requests(4, 4, max_new_tokens=4000)
        rows: list = []
        found: list[Completion] = []
        sampling = threading.Thread(
            target=lambda: rows.extend(service.generate(requests, found.append))
        )
        sampling.start()
        deadline = time.monotonic() + 60
        while service.health()[0].num_running != 16:
            assert time.monotonic() < deadline
        service.abort()
        sampling.join(timeout=60)
        assert {c.finish_reason for row in rows for c in row} == {"abort"}
        assert found == []
        assert service.health()[0].num_running == 0


def test_a_loop_ends_what_nobody_waits_for() -> None:
    loop = EventLoopThread("test")
    begun, ended = threading.Event(), threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match="a thing"):
        loop.run(hang(), "a thing", 0.05)
    if begun.is_set():  # who was too late for that is not there to be ended
        assert ended.wait(60)
    begun.clear()
    ended.clear()
    loop.start(hang())
    assert begun.wait(60)
    loop.close()
    loop.close()
    assert ended.is_set()


PROMPTS = [PromptRequest(f"r{at}", tuple(range(4, 9 + at)), 2, num_top=3) for at in range(7)]


def largest_difference(found: list[PromptLogprobs], expected: list[PromptLogprobs]) -> float:
    assert [each.request_id for each in found] == [each.request_id for each in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((a.logprobs_N - b.logprobs_N).abs().max()) for a, b in pairs)


def expected_of(lab) -> list[PromptLogprobs]:
    return asyncio.run(lab.engine().prompt_logprobs(PROMPTS))


def test_replicas_split_sequences_and_answers_keep_their_order(lab) -> None:
    engines, asked = [lab.bare_engine() for _ in range(3)], list[list[str]]()
    for engine in engines:
        inner = engine.prompt_logprobs

        def spy(part, inner=inner):
            asked.append([request.request_id for request in part])
            return inner(part)

        engine.prompt_logprobs = spy
    with serving(*engines) as service:
        with pytest.raises(RolloutError, match="no confirmed weights"):
            service.prompt_logprobs(PROMPTS)
        publish(service, lab.model, 3)
        found = service.prompt_logprobs(PROMPTS)
        assert service.prompt_logprobs([]) == []
        # Whoever is asked about tokens still samples.
        assert service.generate(lab.requests(2, 1))
    ids = [request.request_id for request in PROMPTS]
    assert sorted(asked) == [ids[0::3], ids[1::3], ids[2::3]]
    assert largest_difference(found, expected_of(lab)) <= 1e-5


def test_duplicate_sequence_ids_are_refused_across_replicas(lab) -> None:
    with serving(lab.bare_engine(), lab.bare_engine()) as service:
        publish(service, lab.model, 0)
        with pytest.raises(RolloutError, match="two requests of one batch have the same id"):
            service.prompt_logprobs([PROMPTS[0], replace(PROMPTS[1], request_id="r0")])


def test_answers_that_are_not_those_asked_for_are_refused(lab) -> None:
    engine = lab.bare_engine()

    async def prompt_logprobs(requests):
        return [PromptLogprobs("another", torch.zeros(1)) for _ in requests]

    engine.prompt_logprobs = prompt_logprobs
    with serving(engine) as service:
        publish(service, lab.model, 0)
        with pytest.raises(RolloutError, match="asked about 7 sequences, got 7 answers"):
            service.prompt_logprobs(PROMPTS)


def test_an_engine_without_the_capability_says_so(lab) -> None:
    engine = lab.bare_engine()
    engine.prompt_logprobs = lambda requests: RolloutEngine.prompt_logprobs(engine, requests)
    with serving(engine) as service:
        publish(service, lab.model, 0)
        with pytest.raises(
            RolloutError, match="TransformersEngine cannot return logprobs of a prompt"
        ):
            service.prompt_logprobs(PROMPTS)


def test_what_one_replica_refuses_leaves_no_load_on_the_others(lab) -> None:
    engines = [lab.bare_engine(), lab.bare_engine()]
    inner = engines[1].prompt_logprobs

    async def slow(requests):
        await asyncio.sleep(600)

    engines[1].prompt_logprobs = slow
    with serving(*engines) as service:
        publish(service, lab.model, 0)
        with pytest.raises(RolloutError, match="unknown: a token is outside"):
            service.prompt_logprobs([PromptRequest("unknown", (4, 10**6)), *PROMPTS])
        engines[1].prompt_logprobs = inner
        assert len(service.prompt_logprobs(PROMPTS)) == 7
