"""When a library's samples are gone: aborted or given up, they may end later than the call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import RolloutError, WeightSyncError
from engines.rollout.served import engine as served_engine
from engines.rollout.served.engine import RunningSample, ServedEngine
from engines.types import Completion, RolloutRequest, SamplingParams
from engines.weight_sync.base import WeightDigest
from infra.errors import DeadlineError

RECEIPT = WeightDigest("0" * 32, 1, 4)
ASKED = RolloutRequest("a", (1, 2), SamplingParams(4), (0, 1))
CHANGES: list[tuple[str, tuple[Any, ...]]] = [
    ("update_weights", (None, 1)),
    ("update_adapter", (None, 1)),
    ("sleep", ()),
]


class LateSampler:
    """As vLLM: an abort puts a last answer in line, and returns before anyone has it."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.aborted: dict[str, asyncio.Event] = {}

    async def sample(self, sample: RunningSample) -> Completion:
        try:
            await self.aborted.setdefault(sample.name, asyncio.Event()).wait()
        finally:
            await asyncio.sleep(self.delay_s)
        return sample.empty()


class Library(ServedEngine):
    """An engine that holds weights, samples until it is told to end, and takes any update."""

    def __init__(self, delay_s: float = 0.0) -> None:
        layout: Any = SimpleNamespace(vocab_size=12)
        stops: Any = SimpleNamespace(follow=lambda request, place: None)
        self.sampler = LateSampler(delay_s)
        super().__init__("it", layout, "float32", 10.0, stops, 8, 2)
        self._version, self._holds_weights = 0, True

    @property
    def _is_lost(self) -> bool:
        return False

    async def _sample(self, sample: RunningSample) -> Completion:
        return await self.sampler.sample(sample)

    def _check_request(self, request: RolloutRequest) -> None:
        pass

    async def _load(self, order: str) -> Sequence[str]:
        return ["order"]

    async def _load_adapter(self, source: Any) -> WeightDigest:
        return RECEIPT

    async def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            self.sampler.aborted[name].set()

    async def _free(self, level: str) -> None:
        pass

    async def _stop_sampling(self) -> None:
        pass

    async def _ask(self) -> None:
        pass


Library.__abstractmethods__ = frozenset()


@pytest.fixture(autouse=True)
def any_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engine, "order_of", lambda *_: "order")
    monkeypatch.setattr(served_engine, "agreed", lambda _: RECEIPT)


async def reading(stream: AsyncIterator[Completion]) -> list[Completion]:
    return [completion async for completion in stream]


def with_samples(test: Callable[[Library, asyncio.Task[Any]], Awaitable[None]], delay_s: float):
    async def run() -> None:
        library = Library(delay_s)
        task = asyncio.create_task(reading(library.generate([ASKED])))
        await asyncio.sleep(0.01)
        assert (await library.health()).num_running == 2
        await test(library, task)

    asyncio.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
@pytest.mark.parametrize(("name", "arguments"), CHANGES)
def test_after_an_abort_it_changes(name: str, arguments: tuple[Any, ...], delay_s: float) -> None:
    async def test(library: Library, task: asyncio.Task[Any]) -> None:
        await library.abort()
        await getattr(library, name)(*arguments)
        assert [each.finish_reason for each in await task] == ["abort", "abort"]

    with_samples(test, delay_s)


@pytest.mark.parametrize(("name", "arguments"), CHANGES)
def test_when_nobody_waits_for_its_samples_it_changes(
    name: str, arguments: tuple[Any, ...]
) -> None:
    async def test(library: Library, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await getattr(library, name)(*arguments)

    with_samples(test, 0.05)


@pytest.mark.parametrize(("name", "arguments"), CHANGES)
def test_with_samples_that_somebody_waits_for_it_refuses(
    name: str, arguments: tuple[Any, ...]
) -> None:
    async def test(library: Library, task: asyncio.Task[Any]) -> None:
        with pytest.raises((WeightSyncError, RolloutError), match="samples are in flight"):
            await getattr(library, name)(*arguments)
        assert not task.done()
        await library.abort()
        await task

    with_samples(test, 0.0)


def test_samples_that_are_paused_stay_where_they_are() -> None:
    async def test(library: Library, task: asyncio.Task[Any]) -> None:
        await library.pause()
        await library.update_weights(None, 1)  # type: ignore[arg-type]
        assert not task.done()
        await library.abort()
        await task

    with_samples(test, 0.0)


def test_samples_that_do_not_end_meet_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engine, "END_DEADLINE_S", 0.05)

    async def test(library: Library, task: asyncio.Task[Any]) -> None:
        await library.abort()
        with pytest.raises(DeadlineError, match="2 aborted samples of it to end"):
            await library.update_weights(None, 1)  # type: ignore[arg-type]
        await task

    with_samples(test, 0.3)


def test_no_sample_has_a_name_with_which_that_of_another_begins() -> None:
    """SGLang aborts every sample whose name begins with the one that it is told."""

    async def main() -> list[str]:
        engine = Library()
        asked = [ASKED, replace(ASKED, request_id="a/greedy"), replace(ASKED, request_id="0")]
        stream = engine.generate(asked)
        await asyncio.sleep(0)
        names = list(engine.sampler.aborted)
        await engine.abort()
        assert len([completion async for completion in stream]) == 6
        return names

    names = asyncio.run(main())
    assert len(names) == 6
    assert [(a, b) for a in names for b in names if a is not b and b.startswith(a)] == []
