"""OpenAI's API over HTTP, before a real engine with a tiny model."""

import asyncio
import json
import shutil
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from rlhf.testing.rollout_calls import send_weights_async
from transformers import AutoModelForCausalLM

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.options import check_rollout
from engines.config.rollout import RolloutConfig
from engines.controller.replica import ReplicaProcess, ReplicaSpec
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.chat import render_prompts
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.rollout.base import NEED_IDLE
from engines.rollout.openai_endpoint import serve
from engines.rollout.served import engine as served_engine
from engines.rollout.served.engine import RunningSample, ServedEngine
from engines.types import Completion, RolloutRequest, SamplingParams
from engines.weight_sync.base import WeightDigest
from infra.errors import ConfigError

MESSAGES = [{"role": "user", "content": "1+2="}]
ROLLOUT = RolloutConfig(placement="disaggregated", openai_endpoint=True, timeout_s=60)


@pytest.fixture(autouse=True)
def own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica sends what its process prints to its log; here that would be the tests' own.

    Asked for its node, Ray would start a cluster of its own for this process.
    """
    monkeypatch.setattr("engines.controller.replica.log_to", lambda path: None)
    monkeypatch.setattr("engines.controller.replica.this_node", lambda: "here")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    tokenizer_dir = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=64, chat_template=None
    )
    shape = ArchitectureConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32
    )
    create_random_model(shape, tokenizer_dir, 64, 1, root / "model")
    return root / "model"


class Client:
    """What a user of the endpoint has: the file with address and key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = json.loads(path.read_text())

    async def post(
        self, call: str, key: str | None = None, **body: Any
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key or self.told['api_key']}"}
        url = f"{self.told['base_url']}/{call}"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json={"model": "policy", **body}) as got,
        ):
            return got.status, await got.json()


def on_a_replica(
    hf_dir: Path, tmp_path: Path, test: Callable[[ReplicaProcess, Client], Awaitable[None]]
) -> None:
    """Run a test beside a replica's own code in this process; without weights at first."""
    spec = ReplicaSpec(hf_dir, ROLLOUT, "float32", "cpu", None, torch.get_num_threads(), tmp_path)

    async def run() -> None:
        replica = ReplicaProcess(0, spec, "127.0.0.1")
        await replica.build()
        client = Client(tmp_path / "replica-0.openai.json")
        try:
            await test(replica, client)
        finally:
            await replica.call("close", ())
        assert not client.path.exists()
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post("completions", prompt="1+2=")

    asyncio.run(run())


class Through:
    """An engine as the trainer reaches it: by the calls of the replica."""

    def __init__(self, replica: ReplicaProcess) -> None:
        self.replica = replica

    async def update_weights(self, source, version: int):
        return await self.replica.call("update_weights", (source, version))

    async def finish_update(self, version: int, digest: str) -> None:
        await self.replica.call("finish_update", (version, digest))


async def give_weights(replica: ReplicaProcess, hf_dir: Path, version: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(hf_dir)
    named = model.named_parameters()
    await send_weights_async(Through(replica), ((n, p) for n, p in named), version)  # type: ignore[arg-type]


async def sampled(replica: ReplicaProcess, request: RolloutRequest) -> list[Completion]:
    found = [completion async for completion in replica.generate([request])]
    return sorted(found, key=lambda completion: completion.sample_index)


def test_an_answer_is_what_the_engine_samples(hf_dir: Path, tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer.load(hf_dir)

    async def test(replica: ReplicaProcess, client: Client) -> None:
        await give_weights(replica, hf_dir, 7)
        asked: dict[str, Any] = {"n": 2, "seed": 5, "temperature": 0.7}
        status, chat = await client.post(
            "chat/completions", messages=MESSAGES, max_tokens=9, **asked
        )
        assert status == 200
        [prompt_ids] = render_prompts(tokenizer, [[Message("user", "1+2=")]])
        expected = await sampled(
            replica, RolloutRequest("own", prompt_ids, SamplingParams(9, 0.7), (5, 6))
        )
        for choice, sample in zip(chat["choices"], expected, strict=True):
            assert choice["token_ids"] == sample.token_ids.tolist()
            assert choice["message"]["content"] == tokenizer.decode(
                sample.token_ids.tolist(), skip_special_tokens=True
            )
            logprobs = [row["logprob"] for row in choice["logprobs"]["content"]]
            assert logprobs == pytest.approx(sample.logprobs.tolist(), abs=1e-5)
            assert set(choice["policy_versions"]) == {7}
        assert chat["system_fingerprint"] == "version=7"
        assert chat["usage"]["prompt_tokens"] == len(prompt_ids)
        status, plain = await client.post(
            "completions", prompt=list(prompt_ids), max_tokens=9, **asked
        )
        assert status == 200
        assert [c["token_ids"] for c in plain["choices"]] == [
            c["token_ids"] for c in chat["choices"]
        ]

    on_a_replica(hf_dir, tmp_path, test)


def test_the_file_is_its_owners_and_a_stranger_gets_nothing(hf_dir: Path, tmp_path: Path) -> None:
    async def test(replica: ReplicaProcess, client: Client) -> None:
        assert stat.S_IMODE(client.path.stat().st_mode) == 0o600
        assert client.told["base_url"].startswith("http://127.0.0.1:")
        status, told = await client.post("completions", key="guess", prompt="1")
        assert (status, told["error"]["type"]) == (401, "invalid_api_key")
        assert client.told["api_key"] not in json.dumps(told)

    on_a_replica(hf_dir, tmp_path, test)


def test_nothing_is_served_around_an_update(hf_dir: Path, tmp_path: Path) -> None:
    async def test(replica: ReplicaProcess, client: Client) -> None:
        status, _ = await client.post("completions", prompt="1+2=")
        assert status == 503  # no weights yet
        await give_weights(replica, hf_dir, 0)
        await replica.call("pause", ())
        waiting = asyncio.create_task(client.post("completions", prompt="1+2=", max_tokens=40))
        async with asyncio.timeout(60):
            while not (await replica.call("health", ())).num_running:
                await asyncio.sleep(0.01)
        # With its sample in flight the engine would refuse the update, and end the run.
        await give_weights(replica, hf_dir, 1)
        status, told = await waiting
        assert (status, told["error"]["type"]) == (503, "service_unavailable")
        await replica.call("resume", ())
        status, told = await client.post("completions", prompt="1+2=", max_tokens=4)
        assert (status, told["system_fingerprint"]) == (200, "version=1")
        await replica.call("sleep", ("weights",))
        status, _ = await client.post("completions", prompt="1+2=")
        assert status == 503

    on_a_replica(hf_dir, tmp_path, test)


class LateEngine(ServedEngine):
    """Its library samples until it is told to end, and says so after the call that told it."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        layout: Any = SimpleNamespace(vocab_size=64)
        stops: Any = SimpleNamespace(follow=lambda request, place: None)
        super().__init__("it", layout, "float32", 60.0, stops, 64, 2)
        self._version, self._holds_weights = 0, True

    @property
    def _is_lost(self) -> bool:
        return False

    async def _sample(self, sample: RunningSample) -> Completion:
        await self.told.wait()
        await asyncio.sleep(0.05)
        return sample.empty()

    async def _load_adapter(self, source: Any) -> WeightDigest:
        return WeightDigest("0" * 32, 1, 4)

    async def _load(self, order: str) -> list[str]:
        return ["loaded"]

    async def _abort(self, names: Sequence[str]) -> None:
        self.told.set()

    def _check_request(self, request: RolloutRequest) -> None:
        return

    async def _free(self, level: str) -> None:
        return

    async def _name_version(self, version: int) -> None:
        return

    async def _ask(self) -> None:
        return

    async def _end(self) -> None:
        return


LateEngine.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("name", sorted(NEED_IDLE))
def test_open_request_blocks_no_call_that_needs_an_idle_engine(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(served_engine, "order_of", lambda *_: "order")
    monkeypatch.setattr(served_engine, "agreed", lambda _: WeightDigest("0" * 32, 1, 4))

    async def run() -> None:
        endpoint = await serve(LateEngine(), hf_dir, 60.0, tmp_path / "told.json")
        client = Client(tmp_path / "told.json")
        assert (await endpoint.call("health", ())).can_serve
        waiting = asyncio.create_task(client.post("completions", prompt="1", max_tokens=4))
        async with asyncio.timeout(60):
            while not (await endpoint.call("health", ())).num_running:
                await asyncio.sleep(0.01)
        changing = asyncio.create_task(
            endpoint.call(name, ("weights",) if name == "sleep" else (None, 1))
        )
        await asyncio.sleep(0.01)
        # Whoever asks how it is does not open it again while it waits to be changed.
        await endpoint.call("health", ())
        assert (await client.post("completions", prompt="1", max_tokens=4))[0] == 503
        assert not changing.done()
        await changing
        assert (await waiting)[0] == 503
        if name != "sleep":
            assert (await client.post("completions", prompt="1"))[0] == 503
            await endpoint.call("finish_update", (1, "0" * 32))
            assert (await endpoint.call("health", ())).version == 1
        await endpoint.call("close", ())

    asyncio.run(run())


def test_an_answer_may_be_as_long_as_the_model_computes_it_alone(
    hf_dir: Path, tmp_path: Path
) -> None:
    """Beyond the limit of its rotary angles no engine takes a request."""
    short = tmp_path / "short"
    shutil.copytree(hf_dir, short)
    config = json.loads((short / "config.json").read_text())
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    (short / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))

    async def test(replica: ReplicaProcess, client: Client) -> None:
        await give_weights(replica, short, 0)
        status, told = await client.post("chat/completions", messages=MESSAGES)
        assert status == 200, told
        assert told["usage"]["total_tokens"] <= 32

    on_a_replica(short, tmp_path, test)


def test_what_is_not_understood_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "1", "logit_bias": {"3": 100}}, "logit_bias"),
        ({"prompt": "1", "stream": True}, "stream"),
        ({"prompt": "1", "temperature": -1}, "temperature"),
        ({"prompt": [10**6]}, "outside the vocabulary"),
        ({"prompt": "1", "max_tokens": 1000}, "do not fit"),
        ({}, "prompt"),
    ]

    async def test(replica: ReplicaProcess, client: Client) -> None:
        await give_weights(replica, hf_dir, 0)
        for body, said in cases:
            status, told = await client.post("completions", **body)
            assert status == 400, body
            assert said in told["error"]["message"]

    on_a_replica(hf_dir, tmp_path, test)


def test_an_engine_inside_a_rank_has_none() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.openai_endpoint: got true"):
        check_rollout(RolloutConfig(openai_endpoint=True))
