"""A rollout engine under its contract: its loop, the weights it is sent, what it is asked."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from rlhf.testing.rollout_models import (
    CONTEXT_LENGTH,
    PREFIX,
    config,
    largest_difference,
    receipt_of,
    source_of,
    tensors_of,
)
from transformers import PretrainedConfig

from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.rollout.base import create_rollout_engine
from engines.types import Completion, RolloutRequest, SamplingParams
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform

TIMEOUT_S = 120.0
OPTIONS = {
    # A budget that makes prompts wait for each other.
    "transformers": {"max_prefill_tokens": CONTEXT_LENGTH},
    "sglang": {"max_prefill_tokens": CONTEXT_LENGTH, "kv_cache_bytes": 2**25},
    "vllm": {"max_prefill_tokens": CONTEXT_LENGTH, "kv_cache_bytes": 2**26},
}


class Served:
    """One engine, the loop that all calls to it come from, and the models that it may serve."""

    def __init__(
        self,
        name: str,
        tied: bool,
        directory: Path,
        timeout_s: float,
        max_num_sequences: int = 6,
        adapter: LoraConfig | None = None,
        model_config: PretrainedConfig | None = None,
        options: Mapping[str, Any] = {},
        dtype: str = "float32",
        quantization: Literal["fp8"] | None = None,
        platform: PlatformBase | None = None,
    ) -> None:
        self.name, self.tied, self.timeout_s = name, tied, timeout_s
        self._directory = directory
        self._num_files = 0
        (model_config or config(tied)).save_pretrained(directory)
        rollout = RolloutConfig(
            engine=name,
            timeout_s=timeout_s,
            max_num_sequences=max_num_sequences,
            quantization=quantization,
            options={**OPTIONS.get(name, {}), **options},
        )
        self.processes_before = set(psutil.Process().children(recursive=True))
        self.engine = create_rollout_engine(
            name, directory, rollout, dtype, platform or CPUPlatform(), adapter
        )
        self._loop = asyncio.Runner()
        # The loop's own would begin with, and seem to be left by, the first test that needs it.
        self._loop.get_loop().set_default_executor(ThreadPoolExecutor())

    def run(self, coroutine):
        async def with_deadline():
            async with asyncio.timeout(TIMEOUT_S):
                return await coroutine

        return self._loop.run(with_deadline())

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.close()

    def source(self, tensors: dict[str, torch.Tensor]):
        self._num_files += 1
        return source_of(tensors, self._directory / f"{self._num_files}.safetensors")

    def send(self, made, version: int) -> None:
        tensors = tensors_of(made)
        receipt = self.run(self.engine.update_weights(self.source(tensors), version))
        assert receipt == receipt_of(tensors)
        self.run(self.engine.finish_update(version, receipt.digest))

    def generate(self, asked: list[RolloutRequest]) -> list[Completion]:
        return self.run(self.collect(asked))

    async def collect(self, asked: list[RolloutRequest]) -> list[Completion]:
        found = [completion async for completion in self.engine.generate(asked)]
        place = {request.request_id: index for index, request in enumerate(asked)}
        found.sort(key=lambda c: (place[c.request_id], c.sample_index))
        wanted = [(r.request_id, i) for r in asked for i in range(r.num_samples)]
        assert [(c.request_id, c.sample_index) for c in found] == wanted
        return found

    def parity(self, made) -> float:
        """Largest difference on prompts short and long, cold and cached."""
        asked = requests()
        return largest_difference(made, asked, self.generate(asked))


def requests(max_new_tokens: int = 16, **sampling) -> list[RolloutRequest]:
    prompts = [(5,), (6, 7, 8, 9, 10, 11, 12), PREFIX, (*PREFIX, 13, 14, 15)]
    return [
        RolloutRequest(
            f"prompt={index}",
            prompt,
            SamplingParams(max_new_tokens, **sampling),
            tuple(100 * index + sample for sample in range(3)),
        )
        for index, prompt in enumerate(prompts)
    ]
