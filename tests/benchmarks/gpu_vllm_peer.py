"""vLLM in a process of its job environment, bare or behind our engine class; see `gpu_vllm.py`.

Answers requests, a line of JSON each, over its standard streams.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ANSWER = "ANSWER "
SYNC_TIMEOUT_S, HOST = 300.0, "127.0.0.1"


class Ours:
    """One engine behind a `RolloutService`, and the weights that it is sent."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from engines.config.rollout import RolloutConfig
        from engines.rollout.base import create_rollout_engine
        from engines.rollout.service import RolloutService
        from hardware.detection import detect

        self._dtype, hf_dir = request["dtype"], Path(request["hf_dir"])
        platform, _ = detect(request["platform"])
        self._platform = platform.name
        rollout = RolloutConfig(
            engine="vllm",
            max_num_sequences=request["max_num_sequences"],
            timeout_s=SYNC_TIMEOUT_S,
            options={
                "kv_cache_bytes": request["cache_bytes"],
                "max_model_len": request["max_model_len"],
            },
        )
        start = time.perf_counter()
        engine = create_rollout_engine("vllm", hf_dir, rollout, self._dtype, platform)
        self.start_s = time.perf_counter() - start
        self._service = RolloutService([engine], SYNC_TIMEOUT_S)
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=getattr(torch, self._dtype))
        self._model, self._version = model.to(platform.device()), 0

    def sync(self, request: dict[str, Any]) -> dict[str, float]:
        """Bytes of a sync by the transport that is named and its seconds, the best of several."""
        found = [self._sync(request["transport"]) for _ in range(request["times"])]
        return {"num_bytes": found[0][0], "seconds": min(seconds for _, seconds in found)}

    def _sync(self, transport: str) -> tuple[int, float]:
        from engines.weight_sync import device_ipc, shared_memory

        names: frozenset[str] = frozenset()
        new_transport = {
            "shared memory": partial(
                shared_memory.open_transport, self._dtype, names, SYNC_TIMEOUT_S, HOST
            ),
            "device IPC": partial(
                device_ipc.open_transport, self._platform, self._dtype, names, SYNC_TIMEOUT_S, HOST
            ),
        }[transport]
        self._version += 1
        report = self._service.sync(
            new_transport, lambda way: way.send(self._weights()), self._version
        )
        return report.sent.num_bytes, report.seconds

    def _weights(self) -> Iterator[tuple[str, Any]]:
        return ((name, weight.detach()) for name, weight in self._model.named_parameters())

    def sample(self, request: dict[str, Any]) -> int:
        """Number of tokens."""
        from engines.types import RolloutRequest, SamplingParams

        rows = zip(request["names"], request["prompts"], request["seeds"], strict=True)
        sampling = SamplingParams(request["max_new_tokens"])
        asked = [RolloutRequest(n, tuple(ids), sampling, tuple(seeds)) for n, ids, seeds in rows]
        return sum(len(done.token_ids) for row in self._service.generate(asked) for done in row)

    def close(self) -> None:
        """End vLLM's processes."""
        self._service.close()


class Bare:
    """`AsyncLLM` with the arguments that ours gives it, its weights from the directory."""

    def __init__(self, request: dict[str, Any]) -> None:
        if request["platform"] == "cpu":
            os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu, length = request["platform"] == "cpu", request["max_model_len"]
        arguments = AsyncEngineArgs(
            model=request["hf_dir"],
            dtype=request["dtype"],
            max_model_len=length,
            max_num_seqs=request["max_num_sequences"],
            max_num_batched_tokens=max(8192, length),
            enable_chunked_prefill=not on_cpu,
            kv_cache_memory_bytes=request["cache_bytes"],
            enforce_eager=on_cpu,
            skip_tokenizer_init=True,
            generation_config="vllm",
        )
        self._runner, self._turn = asyncio.Runner(), 0
        self._stop = json.loads(Path(request["hf_dir"], "config.json").read_text())["eos_token_id"]

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        began = time.perf_counter()
        self._llm = self._runner.run(start())
        self.start_s = time.perf_counter() - began

    def sample(self, request: dict[str, Any]) -> int:
        """Number of tokens."""
        self._turn += 1
        return self._runner.run(self._sample(request))

    async def _sample(self, request: dict[str, Any]) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one(name: str, prompt: list[int], seed: int) -> int:
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=request["max_new_tokens"],
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                stop_token_ids=[self._stop],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            num_tokens = 0
            async for found in self._llm.generate({"prompt_token_ids": prompt}, params, name):
                num_tokens = len(found.outputs[0].token_ids)
            return num_tokens

        rows = zip(request["names"], request["prompts"], request["seeds"], strict=True)
        calls = [
            one(f"{self._turn}/{name}/{index}", prompt, seed)
            for name, prompt, seeds in rows
            for index, seed in enumerate(seeds)
        ]
        return sum(await asyncio.gather(*calls))

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()


def answered(engine: Any, request: dict[str, Any]) -> dict[str, float]:
    """Of a request to an engine that was started."""
    if request["task"] == "sync":
        return engine.sync(request)
    if request["task"] == "close":
        engine.close()
        return {}
    start = time.perf_counter()
    num_tokens = engine.sample(request)
    return {"num_tokens": num_tokens, "seconds": time.perf_counter() - start}


def main() -> None:
    """Answer until the standard input ends."""
    # vLLM's processes write to the standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if engine is None:
            engine = {"ours": Ours, "bare": Bare}[request["kind"]](request)
            found = {"start_s": engine.start_s}
        else:
            found = answered(engine, request)
        answers.write(ANSWER + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
