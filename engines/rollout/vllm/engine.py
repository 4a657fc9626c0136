"""The rollout engine vllm: vLLM's AsyncLLM, whose processes read the weights themselves.

Promises: the contract of `engines.rollout.base`. Samples paused during an update are recomputed up
to where they stood, and each token carries the version that sampled it. `close` ends every process
of vLLM. The tensors of an adapter are checked before vLLM gets them as files; the
checksum is of the written tensors. vLLM reports modules that it does not know. Environment
variables are set before vLLM reads them; it runs on the requested platform or not at all, sends no
usage data, downloads nothing, and reads no weights from the model directory.
Does not promise: the same tokens for a seed as another engine; `score` and `prompt_logprobs` while
paused; a quick start, since its processes import vLLM anew, about 25 s of CPU time.
"""

import asyncio
import itertools
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor

from engines.checkpoint.peft_adapter import write_peft_adapter
from engines.config.rollout import NEEDS_FP8, RolloutConfig
from engines.config.training import LoraConfig
from engines.errors import WeightSyncError
from engines.rollout.base import Capability, MemoryTag, SleepLevel
from engines.rollout.expected_tensors import digest_of
from engines.rollout.prompt_logprobs import PromptRequest, PromptRows
from engines.rollout.served.engine import RunningSample, ServedEngine
from engines.rollout.served.weight_receiver import ModelLayout, read_layout
from engines.rollout.stop_strings import StopStrings
from engines.rollout.vllm.options import VllmOptions
from engines.rollout.vllm.translation import (
    check_temperature,
    completion,
    prompt_rows,
    sampling_params,
    score_sequence,
)
from engines.rollout.vllm.worker_extension import WorkerExtension
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.faults import fault

_A, _B = ".lora_A.weight", ".lora_B.weight"
SHUTDOWN_TIMEOUT_S = 30.0
CPU_KV_CACHE_BYTES = 2**30
WORKER_EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
ADAPTER = "policy"
"""vLLM's name of the adapter."""
MEMORY_TAGS: dict[MemoryTag, str] = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names of what it frees asleep."""


def start_llm(
    hf_dir: Path,
    rollout: RolloutConfig,
    dtype: str,
    platform: PlatformBase,
    layout: ModelLayout,
    adapter: LoraConfig | None,
) -> Any:
    """Start vLLM's processes and return an `AsyncLLM` with random weights that takes requests.

    Raises:
        ConfigError: the options, or the installed vLLM, do not fit the model or the platform.
    """
    config = vllm_config(hf_dir, rollout, dtype, platform, layout, adapter)
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def vllm_config(
    hf_dir: Path,
    rollout: RolloutConfig,
    dtype: str,
    platform: PlatformBase,
    layout: ModelLayout,
    adapter: LoraConfig | None,
) -> Any:
    """Return an engine's `VllmConfig`, and set its environment; raises as `start_llm`."""
    options = VllmOptions.model_validate(rollout.options)
    cache = _set_environment(platform)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if rollout.quantization and not platform.supports_fp8():
        raise ConfigError(*NEEDS_FP8)
    if current_platform.device_type != platform.device_name:
        raise ConfigError(
            "rollout.engine",
            f"the installed vllm is built for {current_platform.device_type or 'no device'}, the "
            f"platform is {platform.device_name}; install the build for it",
        )
    arguments = {
        **engine_arguments(options, rollout, layout, dtype),
        **adapter_arguments(adapter),
        # vLLM finds what it compiled by `model` and the content of the configuration, while the
        # model's directory is another one in each stage. Weights never come from `model`.
        "model": str(cache),
        "hf_config_path": str(hf_dir),
        "tokenizer": str(hf_dir),
        # Only structured output needs the tokenizer.
        "skip_tokenizer_init": not (hf_dir / "tokenizer.json").is_file(),
    }
    if unknown := options.engine_args.keys() - {each.name for each in fields(AsyncEngineArgs)}:
        raise ConfigError(
            "rollout.options.engine_args", f"vLLM has no argument {', '.join(sorted(unknown))}"
        )
    if current_platform.is_cpu() and arguments["enforce_eager"]:
        env.set_for_process(env.TORCHDYNAMO_DISABLE.name, "1")
    try:
        config = AsyncEngineArgs(**(arguments | options.engine_args)).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError("rollout.options", f"vLLM refuses: {error}") from error
    if current_platform.is_cpu():
        _check_latent(config.model_config)
    return config


def engine_arguments(
    options: VllmOptions, rollout: RolloutConfig, layout: ModelLayout, dtype: str
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` by name, without model and adapter."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    max_model_len = min(options.max_model_len or layout.context_length, layout.context_length)
    return {
        # vLLM selects by class name, which a bare configuration lacks. The dtype of the files is
        # not that of the policy's, and would count for what vLLM compiled.
        "hf_overrides": {"architectures": [layout.architecture], "dtype": dtype},
        "dtype": dtype,
        # The finest scales that vLLM has on every platform.
        "quantization": "fp8_per_channel" if rollout.quantization else None,
        "runner": "generate",
        "load_format": "dummy",
        "trust_remote_code": False,
        # Else the model's sampling defaults would replace what a request leaves out.
        "generation_config": "vllm",
        # The default reports the distribution before temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "seed": 0,
        "worker_extension_cls": WORKER_EXTENSION,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_sequences,
        # A split prefill rewinds the random generator after a discarded token, which fails on
        # a CPU and kills the engine.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": (
            max(options.max_prefill_tokens, max_model_len) if on_cpu else options.max_prefill_tokens
        ),
        "tensor_parallel_size": options.tensor_parallel_size,
        # Not Ray: workers use the devices that Ray assigned to this actor.
        "distributed_executor_backend": "mp" if options.tensor_parallel_size > 1 else None,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "block_size": options.block_size,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enable_sleep_mode": sleep_frees_memory(),
        # By itself vLLM 0.32 uses bfloat16 kernels for latent attention, whatever the dtype.
        **(
            {"attention_backend": "CPU_MLA"}
            if on_cpu and layout.is_latent and dtype == "float32"
            else {}
        ),
    }


def adapter_arguments(adapter: LoraConfig | None) -> dict[str, Any]:
    """Return the engine arguments for an adapter; ConfigError if its rank is above vLLM's limit."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    if adapter.rank > max(ranks):
        raise ConfigError(
            "training.lora.rank",
            f"got {adapter.rank}; vLLM takes ranks up to {max(ranks)}; lower it, or set "
            "rollout.lora_sync to merged",
        )
    rank = min(rank for rank in ranks if rank >= adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _check_latent(model_config: Any) -> None:
    """Refuse latent attention (MLA) that vLLM would silently compute wrongly on a CPU."""
    rope = getattr(model_config.hf_text_config, "rope_parameters", None) or {}
    if model_config.use_mla and rope.get("rope_type", "default") == "default":
        raise ConfigError(
            "rollout.engine",
            "got vllm; the model has latent attention with rotary positions that are not scaled, "
            "which vLLM 0.32 computes wrongly on a CPU; choose transformers",
        )


def sleep_frees_memory() -> bool:
    """Return True if vLLM frees memory on this platform; elsewhere its `sleep` does nothing."""
    from vllm.platforms import current_platform

    return current_platform.is_sleep_mode_available()


def _set_environment(platform: PlatformBase) -> Path:
    """Set this process's environment and vLLM's, but for the user's logging and caches.

    Returns the directory of what was compiled, which engines share.
    """
    cache = Path(env.VLLM_CACHE_ROOT.get() or env.home() / "compiled" / "vllm")
    cache.mkdir(parents=True, exist_ok=True)
    env.set_for_platform(platform.rollout_env_vars())
    env.set_for_process(env.VLLM_CPU_KVCACHE_SPACE.name, None)
    for variable, value in (
        (env.VLLM_WORKER_MULTIPROC_METHOD, "spawn"),
        (env.VLLM_NO_USAGE_STATS, "1"),
        (env.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, "1"),
        (env.HF_HUB_OFFLINE, "1"),
        (env.VLLM_CACHE_ROOT, str(cache)),
        # By itself vLLM sets it only once a graph is compiled anew.
        (env.TRITON_CACHE_DIR, env.TRITON_CACHE_DIR.get() or str(cache / "triton")),
        (env.VLLM_LOGGING_LEVEL, env.VLLM_LOGGING_LEVEL.get() or "WARNING"),
        (env.VLLM_LOGGING_STREAM, env.VLLM_LOGGING_STREAM.get() or "ext://sys.stderr"),
    ):
        env.set_for_process(variable.name, value)
    return cache


def receive_adapter(
    source: WeightSource, layout: ModelLayout, lora: LoraConfig, dtype: str, directory: Path
) -> WeightDigest:
    """Write the tensors of an adapter into an existing directory, for the library to load.

    Raises:
        WeightSyncError: a tensor is unknown, repeated, unpaired, or of another shape or dtype.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors():
        if name in tensors:
            raise WeightSyncError(f"{name} was sent twice")
        module = name.removesuffix(_A).removesuffix(_B)
        shape = layout.tensors.get(f"{module}.weight", ())
        if module == name or len(shape) != 2:
            raise WeightSyncError(f"the rollout model has no weight for the adapter {name}")
        wanted = (lora.rank, shape[1]) if name.endswith(_A) else (shape[0], lora.rank)
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
    write_peft_adapter(
        directory, tensors, lora, sorted({module.rpartition(".")[2] for module in modules})
    )
    return digest_of(tensors, source.checksum_method)


class VllmEngine(ServedEngine):
    """Rollout engine on vLLM; creating it starts its processes.

    `adapter` is the shape of the adapter beside the weights; None: weights without an adapter.
    """

    capabilities = frozenset({Capability.SHARED_MEMORY, Capability.PROMPT_LOGPROBS, Capability.FP8})

    def __init__(
        self,
        hf_dir: Path,
        rollout: RolloutConfig,
        dtype: str,
        platform: PlatformBase,
        adapter: LoraConfig | None = None,
    ) -> None:
        layout = read_layout(hf_dir, "vllm", dtype)
        self._llm: Any = start_llm(hf_dir, rollout, dtype, platform, layout, adapter)
        from vllm.v1.engine.exceptions import EngineDeadError

        self._deaths = (EngineDeadError,)
        self._adapter = adapter
        config = self._llm.vllm_config
        self.num_workers = config.parallel_config.tensor_parallel_size
        self._frees_memory = sleep_frees_memory()
        own = {
            Capability.PREFIX_CACHE: config.cache_config.enable_prefix_caching,
            Capability.STRUCTURED_OUTPUT: not config.model_config.skip_tokenizer_init,
            Capability.SLEEP_FREES_MEMORY: self._frees_memory,
            Capability.ADAPTERS: adapter is not None,
        }
        # Set per instance: they depend on the options and the platform.
        self.capabilities = VllmEngine.capabilities | {c for c, has in own.items() if has}  # pyright: ignore[reportAttributeAccessIssue]
        self._adapter_request: Any = None  # vLLM's, for the adapter to sample with
        self._score_numbers = itertools.count()
        super().__init__(
            "vLLM",
            layout,
            dtype,
            rollout.timeout_s,
            StopStrings(hf_dir),
            config.model_config.max_model_len,
            rollout.max_num_sequences,
        )

    @property
    def _is_lost(self) -> bool:
        return self._llm is not None and self._llm.errored

    async def _sample(self, sample: RunningSample) -> Completion:
        # vLLM drops a request whose task is cancelled. `_name_version` has cached its supported
        # tasks, else another coroutine could run before vLLM has registered this sample.
        from vllm.inputs.engine import tokens_input

        found: Any = None
        async for found in self._llm.generate(
            tokens_input(sample.token_ids),
            sampling_params(sample, self._layout.eos_token_ids),
            sample.name,
            lora_request=self._adapter_request,
        ):
            if sample.reaches_stop(found.outputs[0].token_ids) and not found.finished:
                await self._llm.abort(sample.name)
        return completion(sample, found.outputs[0])

    def _check_request(self, request: RolloutRequest) -> None:
        check_temperature(request)

    async def _load(self, order: str) -> Sequence[str]:
        if self._adapter_request is not None and self._in_flight:
            raise WeightSyncError("samples with an adapter are in flight; abort them first")
        self._adapter_request = None
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
            self._adapter_request = LoRARequest(ADAPTER, 1, path)
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
            self._adapter_request,
        )

    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        return await prompt_rows(
            self._llm,
            request,
            num_top,
            f"prompt/{next(self._score_numbers)}",
            self._adapter_request,
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

    async def _take_back(self, tags: Collection[MemoryTag], *, samples: bool) -> None:
        # vLLM schedules nothing until all its memory is awake.
        await self._llm.wake_up([MEMORY_TAGS[tag] for tag in sorted(tags)])

    async def _ask(self) -> None:
        await self._llm.is_sleeping()

    async def _end(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        self._llm = None  # its destructor fails at the end of the process
