"""Engines inside the ranks: what is handed over while the caller waits, and when."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from engines.controller.rollout import RankRollout
from engines.controller.worker_group import InProcessGroup
from engines.types import Completion, RolloutRequest, SamplingParams

REQUESTS = [RolloutRequest(name, (1,), SamplingParams(1), (1, 2)) for name in ("a", "b")]


class Service:
    """Answers at once; says of each sample whether it was handed over before the call ended."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[list[Completion]]:
        keys = [request.sample_keys for request in requests]
        rows = [[answer(*key) for key in of_request] for of_request in keys]
        for each in (each for row in rows for each in row):
            if on_completion is not None and each.finish_reason != "abort":
                on_completion(each)
        self.log.append("answered")
        return rows

    def receive(self, completion: Completion) -> None:
        self.log.append(f"{completion.request_id}{completion.sample_index}")


def answer(name: str, index: int) -> Completion:
    reason = "abort" if (name, index) == ("a", 1) else "stop"
    return Completion(name, index, (1,), (-0.5,), (0,), reason)


def test_the_rank_of_this_process_hands_over_while_it_samples() -> None:
    service = Service()
    worker: Any = SimpleNamespace(_served=lambda: service, _phase=nullcontext, close=lambda: None)
    rows = RankRollout(InProcessGroup(worker)).generate(REQUESTS, service.receive)
    assert service.log == ["a0", "b0", "b1", "answered"]
    assert rows == RankRollout(InProcessGroup(worker)).generate(REQUESTS)


def test_ranks_of_their_own_processes_hand_over_behind_the_call() -> None:
    service = Service()

    def run(method: Any, *arguments: Any) -> Any:
        return method(SimpleNamespace(_served=lambda: service, _phase=nullcontext), *arguments)

    group: Any = SimpleNamespace(run=run)
    rows = RankRollout(group).generate(REQUESTS, service.receive)
    assert service.log == ["answered", "a0", "b0", "b1"]
    assert rows == RankRollout(group).generate(REQUESTS)
