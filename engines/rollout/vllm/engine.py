"""The rollout engine vllm: vLLM's AsyncLLM, whose processes read the weights themselves.

Promises: the contract of `engines.rollout.base`. Samples paused during an update are recomputed up
to where they stood, and each token carries the version that sampled it. `close` ends every process
that vLLM started. The tensors of an adapter are checked before vLLM gets them as files; the
checksum is of the written tensors. vLLM reports modules that it does not know.
Does not promise: the same tokens for a seed as another engine; `score` and `prompt_logprobs` while
paused.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint.peft_adapter import write_peft_adapter
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.errors import WeightSyncError
from engines.rollout.base import Capability, SleepLevel
from engines.rollout.expected_tensors import digest_of
from engines.rollout.prompt_logprobs import PromptRequest, PromptRows
from engines.rollout.served.engine import ServedEngine
from engines.rollout.served.weight_receiver import ModelLayout, read_layout
from engines.rollout.stop_strings import StopStrings
from engines.rollout.vllm import launch
from engines.rollout.vllm.translation import (
    VllmSampler,
    check_temperature,
    prompt_rows,
    score_sequence,
)
from engines.types import RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase
from infra.faults import fault

_A, _B = ".lora_A.weight", ".lora_B.weight"
SHUTDOWN_TIMEOUT_S = 30.0
ADAPTER = "policy"
"""vLLM's name of the adapter."""


def receive_adapter(
    source: WeightSource, layout: ModelLayout, lora: LoraConfig, dtype: str, directory: Path
) -> WeightDigest:
    """Write the tensors of an adapter into an existing directory, for the library to load.

    Raises:
        WeightSyncError: a tensor is unknown, missing, repeated, or of another shape or dtype.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors():
        if name in tensors:
            raise WeightSyncError(f"{name} was sent twice")
        wanted = _shape(name, layout, lora)
        if tuple(tensor.shape) != wanted or tensor.dtype != getattr(torch, dtype):
            raise WeightSyncError(
                f"{name}: sent {tensor.dtype} {tuple(tensor.shape)}, need {dtype} {wanted}"
            )
        # Copied, since the source may reuse its memory; files are written from the CPU.
        tensors[name] = tensor.detach().to("cpu", copy=True)
    if not tensors:
        raise WeightSyncError("no part of the adapter was sent")
    modules = {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    if missing := sorted({m + end for m in modules for end in (_A, _B)} - tensors.keys()):
        raise WeightSyncError(
            f"{len(missing)} parts of the adapter were not sent, first {missing[0]}"
        )
    targets = sorted({module.rpartition(".")[2] for module in modules})
    write_peft_adapter(directory, tensors, lora, targets)
    return digest_of(tensors)


def _shape(name: str, layout: ModelLayout, lora: LoraConfig) -> tuple[int, int]:
    module = name.removesuffix(_A).removesuffix(_B)
    shape = layout.tensors.get(f"{module}.weight", ())
    if module == name or len(shape) != 2:
        raise WeightSyncError(f"the rollout model has no weight for the adapter {name}")
    return (lora.rank, shape[1]) if name.endswith(_A) else (shape[0], lora.rank)


class VllmEngine(ServedEngine):
    """Rollout engine on vLLM; creating it starts its processes or raises ConfigError.

    `adapter` is the shape of the adapter beside the weights; None: there is none.
    """

    capabilities = frozenset({Capability.SHARED_MEMORY, Capability.PROMPT_LOGPROBS})

    def __init__(
        self,
        hf_dir: Path,
        rollout: RolloutConfig,
        dtype: str,
        platform: PlatformBase,
        adapter: LoraConfig | None = None,
    ) -> None:
        layout = read_layout(hf_dir, "vllm", dtype)
        self._llm: Any = launch.start(hf_dir, rollout, dtype, platform, layout, adapter)
        from vllm.v1.engine.exceptions import EngineDeadError

        self._deaths = (EngineDeadError,)
        self._adapter = adapter
        config = self._llm.vllm_config
        self.num_workers = config.parallel_config.tensor_parallel_size
        self._frees_memory = launch.sleep_frees_memory()
        own = {
            Capability.PREFIX_CACHE: config.cache_config.enable_prefix_caching,
            Capability.STRUCTURED_OUTPUT: not config.model_config.skip_tokenizer_init,
            Capability.SLEEP_FREES_MEMORY: self._frees_memory,
            Capability.ADAPTERS: adapter is not None,
        }
        # Set per instance: they depend on the options and the platform.
        self.capabilities = VllmEngine.capabilities | {c for c, has in own.items() if has}  # pyright: ignore[reportAttributeAccessIssue]
        self._vllm_sampler = VllmSampler(self._llm, layout.eos_token_ids)
        self._score_numbers = itertools.count()
        super().__init__(
            "vLLM",
            layout,
            dtype,
            rollout.timeout_s,
            self._vllm_sampler,
            StopStrings(hf_dir),
            config.model_config.max_model_len,
            rollout.max_num_sequences,
        )

    def _check_request(self, request: RolloutRequest) -> None:
        check_temperature(request)

    async def _load(self, order: str) -> Sequence[str]:
        if self._vllm_sampler.adapter is not None and self._in_flight:
            raise WeightSyncError("samples with an adapter are in flight; abort them first")
        self._vllm_sampler.adapter = None
        replies = await self._llm.collective_rpc("receive_weights", args=(order,))
        await self._forget()
        return replies

    async def _load_adapter(self, source: WeightSource) -> WeightDigest:
        if self._adapter is None:
            return await super()._load_adapter(source)
        from vllm.lora.request import LoRARequest

        with TemporaryDirectory(prefix="rlhf-adapter-") as path:
            receipt = await asyncio.to_thread(
                receive_adapter, source, self._layout, self._adapter, self._dtype, Path(path)
            )
            # Always the same name and loaded in place, so that paused samples continue with it.
            try:
                await self._llm.add_lora(LoRARequest(ADAPTER, 1, path, load_inplace=True))
            except self._deaths:
                raise
            except Exception as error:  # vLLM turns every error of its processes into one
                raise WeightSyncError(f"vLLM refuses the adapter: {error}") from error
            self._vllm_sampler.adapter = LoRARequest(ADAPTER, 1, path)
        await self._forget()
        return receipt

    async def _forget(self) -> None:
        if not fault("vllm.prefix_reset"):
            # True: also for paused samples, whose cache was computed with the old weights.
            await self._llm.reset_prefix_cache(True)

    async def _name_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        # Cached here, so that vLLM registers later requests before the coroutine yields.
        await self._llm.get_supported_tasks()

    async def _score(self, ids: Sequence[int], temperature: float) -> tuple[float, ...]:
        return await score_sequence(
            self._llm,
            ids,
            temperature,
            f"score/{next(self._score_numbers)}",
            self._vllm_sampler.adapter,
        )

    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        return await prompt_rows(
            self._llm,
            request,
            num_top,
            f"prompt/{next(self._score_numbers)}",
            self._vllm_sampler.adapter,
        )

    async def _stop_sampling(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def _go_on_sampling(self) -> None:
        await self._llm.resume_generation()

    async def _abort(self, names: Sequence[str]) -> None:
        await self._llm.abort(names)

    async def _free(self, level: SleepLevel) -> None:
        if level == "weights":
            await self._llm.sleep(level=2)
        else:
            await self._llm.pause_generation(mode="abort")
            if self._frees_memory:
                await self._llm.release_kv_cache_memory()

    async def _take_back(self, level: SleepLevel) -> None:
        await self._llm.wake_up()

    async def _ask(self) -> None:
        await self._llm.is_sleeping()

    async def _end(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        self._vllm_sampler.llm = self._llm = None
