"""Starts vLLM: its environment, its arguments, its processes.

Promises: variables are set before vLLM reads them; it runs on the requested platform or not at all,
sends no usage data, downloads nothing, and reads no weights from the model directory.
Does not promise a quick start: its processes import vLLM anew, about 25 s of CPU time.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.rollout.served.weight_receiver import ModelLayout
from engines.rollout.vllm.options import VllmOptions
from engines.rollout.vllm.worker_extension import WorkerExtension
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError

WORKER_EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
CPU_KV_CACHE_BYTES = 2**30
_FIELD = "rollout.options"


def start(
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
    options = VllmOptions.model_validate(rollout.options)
    _set_environment(platform)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.device_type != platform.device_name:
        raise ConfigError(
            "rollout.engine",
            f"the installed vllm is built for {current_platform.device_type or 'no device'}, the "
            f"platform is {platform.device_name}; install the build for it",
        )
    arguments = {
        **engine_arguments(options, rollout.max_num_sequences, layout, dtype),
        **adapter_arguments(adapter),
        # Only structured output needs the tokenizer.
        "skip_tokenizer_init": not (hf_dir / "tokenizer.json").is_file(),
    }
    if unknown := options.engine_args.keys() - {each.name for each in fields(AsyncEngineArgs)}:
        raise ConfigError(
            f"{_FIELD}.engine_args", f"vLLM has no argument {', '.join(sorted(unknown))}"
        )
    if current_platform.is_cpu() and arguments["enforce_eager"]:
        env.set_for_process(env.TORCHDYNAMO_DISABLE.name, "1")
    try:
        config = AsyncEngineArgs(
            model=str(hf_dir), dtype=dtype, **(arguments | options.engine_args)
        ).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(_FIELD, f"vLLM refuses: {error}") from error
    if current_platform.is_cpu():
        _check_latent(config.model_config)
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def engine_arguments(
    options: VllmOptions, max_num_sequences: int, layout: ModelLayout, dtype: str
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` by name, without model, dtype and adapter."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    max_model_len = min(options.max_model_len or layout.context_length, layout.context_length)
    return {
        # vLLM selects by class name, which a bare configuration lacks.
        "hf_overrides": {"architectures": [layout.architecture]},
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
        "max_num_seqs": max_num_sequences,
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
    """Return the engine arguments for an adapter; raise ConfigError if vLLM lacks its rank."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    if adapter.rank > max(ranks):
        raise ConfigError(
            "training.lora.rank",
            f"got {adapter.rank}; vLLM takes an adapter of {max(ranks)} at most; lower it, or set "
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


def _set_environment(platform: PlatformBase) -> None:
    """Set variables for this process and vLLM's; the user's logging variables are kept."""
    env.set_for_rollout(platform.rollout_env_vars())
    env.set_for_process(env.VLLM_CPU_KVCACHE_SPACE.name, None)
    for variable, value in (
        (env.VLLM_WORKER_MULTIPROC_METHOD, "spawn"),
        (env.VLLM_NO_USAGE_STATS, "1"),
        (env.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, "1"),
        (env.HF_HUB_OFFLINE, "1"),
        (env.VLLM_LOGGING_LEVEL, env.VLLM_LOGGING_LEVEL.get() or "WARNING"),
        (env.VLLM_LOGGING_STREAM, env.VLLM_LOGGING_STREAM.get() or "ext://sys.stderr"),
    ):
        env.set_for_process(variable.name, value)
