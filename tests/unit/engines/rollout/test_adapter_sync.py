"""An adapter that travels alone: what it stands on is sent once to each engine that lacks it."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from torch import Tensor

from engines.errors import ReplicaLostError, WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.rollout.publishing import WeightRoute
from engines.rollout.replica_pool import RestartPolicy
from engines.rollout.service import RolloutService
from engines.weight_sync.base import Transport, WeightDigest
from engines.weight_sync.buckets import CastStream
from engines.weight_sync.in_process import InProcessTransport

ADAPTER = {"q_proj.lora_A.weight": torch.ones(2, 4), "q_proj.lora_B.weight": torch.zeros(4, 2)}


class Trainer:
    """What it holds, and how often it sent either part."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.sent: list[str] = []

    def publish(self, service: RolloutService, version: int):
        def new(_) -> InProcessTransport:
            return InProcessTransport("float32", 20.0)

        adapter = WeightRoute(new, lambda to: self.send(to, "adapter", ADAPTER))
        send = lambda to: self.send(to, "weights", self.weights)  # noqa: E731
        return service.sync(new, send, version, adapter=adapter)

    def send(self, to: Transport, what: str, tensors: dict[str, Tensor]) -> WeightDigest:
        self.sent.append(what)
        return to.send(iter(tensors.items()))


def taking(engine: RolloutEngine) -> RolloutEngine:
    """It takes adapters, which change nothing of what it samples."""

    async def update_adapter(source, version: int) -> WeightDigest:
        found = CastStream(source.tensors(), torch.float32)
        await asyncio.to_thread(list, found)
        engine._pending = (version, found.sent.digest)
        return found.sent

    engine.update_adapter = update_adapter
    return engine


@contextmanager
def serving(lab) -> Iterator[tuple[RolloutService, RolloutEngine]]:
    class Spare:
        async def restart(self, place: int, lost: RolloutEngine) -> RolloutEngine:
            return taking(lab.bare_engine())

    engine = taking(lab.bare_engine())
    with closing(
        RolloutService([engine], 60.0, restarts=RestartPolicy(Spare().restart, 1, 5.0))
    ) as made:
        yield made, engine


def test_frozen_weights_are_sent_once_and_adapters_each_time(lab) -> None:
    trainer = Trainer(lab.model)
    with serving(lab) as (service, _):
        report = trainer.publish(service, 0)
        assert trainer.sent == ["weights", "adapter"]
        assert report.sent.num_bytes == sum(tensor.nbytes for tensor in ADAPTER.values())
        for version in (1, 2):
            trainer.publish(service, version)
            assert [health.version for health in service.health()] == [version]
        assert trainer.sent == ["weights", "adapter", "adapter", "adapter"]
        assert service.generate(lab.requests(2, 1))
        service.sleep()
        trainer.publish(service, 3)
        assert trainer.sent[4:] == ["weights", "adapter"]


def test_an_engine_that_takes_the_place_of_another_gets_both(lab) -> None:
    trainer = Trainer(lab.model)
    with serving(lab) as (service, engine):
        trainer.publish(service, 0)

        async def dies(requests):
            raise ReplicaLostError("replica 0: its process died")
            yield

        engine.generate = dies
        assert service.generate(lab.requests(2, 1))
        assert service.num_restarts == 1
        assert trainer.sent == ["weights", "adapter", "weights", "adapter"]


def test_frozen_weights_that_changed_are_found(lab) -> None:
    trainer = Trainer(lab.model)
    with serving(lab) as (service, engine):
        trainer.publish(service, 0)
        name = next(iter(trainer.weights))
        trainer.weights[name] = trainer.weights[name] + 1e-3

        async def dies(source, version):
            raise ReplicaLostError("replica 0: its process died")

        engine.update_adapter = dies  # the next one needs the weights again
        with pytest.raises(WeightSyncError, match="the trainer holds"):
            trainer.publish(service, 1)


def test_an_adapter_for_an_engine_that_takes_none_is_refused(lab) -> None:
    refused = pytest.raises(WeightSyncError, match="takes no adapters")
    with closing(RolloutService([lab.bare_engine()], 60.0)) as service, refused:
        Trainer(lab.model).publish(service, 0)
