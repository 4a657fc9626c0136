"""Which samples share a call of SGLang's server, and what becomes of each."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from engines.errors import RolloutError
from engines.rollout.served.engine import RunningSample
from engines.rollout.sglang import sampling as sglang_sampling
from engines.rollout.sglang.sampling import SglangSampler
from engines.rollout.sglang.server import Client
from engines.types import Completion, RolloutRequest, SamplingParams
from infra.errors import DeadlineError

REQUEST = RolloutRequest("a", (5, 6), SamplingParams(2), (1, 2, 3))


class Scripted:
    """Stands for the client; answers as a script says, and keeps what it is asked."""

    def __init__(self, script: Callable[[list[str]], list[Any]]) -> None:
        self.asked: list[list[str]] = []
        self._script = script

    async def stream(self, path: str, body: dict[str, Any]):
        self.asked.append(body["rid"])
        for found in self._script(body["rid"]):
            await asyncio.sleep(0)
            if isinstance(found, Exception):
                raise found
            yield found


def end(name: str) -> dict[str, Any]:
    meta = {
        "id": name,
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5], [-0.5]],
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
    }
    return {"output_ids": [7, 8], "meta_info": meta}


def first(name: str) -> dict[str, Any]:
    return {"output_ids": [7], "meta_info": {"id": name, "finish_reason": None}}


def sample(place: int, call: int = 0) -> RunningSample:
    return RunningSample(REQUEST, place, call, f"{call}/{place}")


def sampling(client: Scripted) -> tuple[SglangSampler, Callable[..., asyncio.Task[Completion]]]:
    made = SglangSampler(cast(Client, client), frozenset({3}))
    return made, lambda *which: asyncio.create_task(made.sample(sample(*which)))


def test_a_call_of_generate_is_one_call_of_the_server() -> None:
    client = Scripted(lambda names: [*map(first, names), *map(end, reversed(names))])

    async def main() -> list[int]:
        _, start = sampling(client)
        tasks = [start(place, call) for call in (0, 1) for place in (0, 1)]
        return [(await task).sample_index for task in tasks]

    assert asyncio.run(main()) == [0, 1, 0, 1]
    assert client.asked == [["0/0", "0/1"], ["1/0", "1/1"]]


def test_held_back_samples_wait_and_cancelled_ones_are_not_sent() -> None:
    client = Scripted(lambda names: [*map(end, names)])

    async def main() -> None:
        made, start = sampling(client)
        made.may_send.clear()
        kept, dropped = start(0), start(1)
        await asyncio.sleep(0.01)
        assert not client.asked
        late = start(2)
        dropped.cancel()
        await asyncio.sleep(0.01)
        made.may_send.set()
        await asyncio.gather(kept, late)

    asyncio.run(main())
    assert client.asked == [["0/0", "0/2"]]


@pytest.mark.parametrize(
    ("last", "message"),
    [([RolloutError("refused")], "refused"), ([], "all of 2 samples")],
)
def test_what_has_no_end_fails_and_what_has_one_does_not(
    last: list[Exception], message: str
) -> None:
    client = Scripted(lambda names: [end(names[0]), *last])

    async def main() -> None:
        _, start = sampling(client)
        whole, broken = start(0), start(1)
        assert (await whole).sample_index == 0
        with pytest.raises(RolloutError, match=message):
            await broken

    asyncio.run(main())


def test_close_ends_what_is_under_way() -> None:
    client = Scripted(lambda names: [first(names[0])] * 10**6)

    async def main() -> None:
        made, start = sampling(client)
        answer = start(0)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await made.close()
        with pytest.raises(RolloutError):
            await answer

    asyncio.run(main())


def test_server_ignoring_an_abort_does_not_block_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        async def call(self, path: str, body: dict[str, Any]) -> None:
            await asyncio.Event().wait()

    async def drop_and_close() -> list[BaseException | None]:
        told: list[BaseException | None] = []
        sampler = SglangSampler(cast(Client, Silent()), frozenset({3}))
        sampler._drop("0/0")
        for task in sampler._dropping:
            task.add_done_callback(lambda task: told.append(task.exception()))
        async with asyncio.timeout(60):
            await sampler.close()
        return told

    monkeypatch.setattr(sglang_sampling, "TELL_DEADLINE_S", 0.05)
    [error] = asyncio.run(drop_and_close())
    assert isinstance(error, DeadlineError)
    assert str(error) == "gave up after 0.05 s waiting for SGLang to hear that 0/0 is aborted"
