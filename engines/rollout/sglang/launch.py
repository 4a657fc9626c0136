"""Environment and arguments of SGLang's server.

Promises: it runs on the requested platform or not at all, downloads nothing, reads no weights from
the model directory, and its cache holds at least one sample of the whole context.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engines.config.rollout import RolloutConfig
from engines.rollout.served.weight_receiver import ModelLayout
from engines.rollout.sglang.options import NUM_HELD_BACK, SglangOptions
from engines.rollout.sglang.server import Server, start
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError

CPU_KV_CACHE_BYTES = 2**30


def start_server(
    hf_dir: Path, rollout: RolloutConfig, dtype: str, platform: PlatformBase, layout: ModelLayout
) -> Server:
    """Start SGLang with random weights and wait until it takes requests.

    Raises:
        ConfigError: the options do not fit the model or the platform, or SGLang refuses them.
    """
    options = SglangOptions.model_validate(rollout.options)
    on_cpu = platform.device_name == "cpu"
    if on_cpu and layout.is_latent:
        raise ConfigError(
            "rollout.engine",
            f"got sglang; {layout.architecture} has latent attention, for which SGLang 0.5 needs "
            "kernels that the package index has for no CPU; choose transformers",
        )
    arguments = {
        **server_arguments(hf_dir, options, rollout.max_num_sequences, dtype, platform, layout),
        **options.server_args,
    }
    environment = {
        **platform.rollout_env_vars(),
        env.SGLANG_USE_CPU_ENGINE.name: "1" if on_cpu else None,
        env.SGLANG_PLUGINS.name: "rlhf",
        env.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.name: "0",
        # Else prompt logprobs materialize the logits of all tokens of a step.
        env.SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK.name: "1",
        env.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.name: "1",
        env.HF_HUB_OFFLINE.name: "1",
    }
    return start(arguments, environment)


def context_length(options: SglangOptions, layout: ModelLayout) -> int:
    """Return the limit of prompt and response together, in tokens."""
    return min(options.max_model_len or layout.context_length, layout.context_length)


def server_arguments(
    hf_dir: Path,
    options: SglangOptions,
    max_num_sequences: int,
    dtype: str,
    platform: PlatformBase,
    layout: ModelLayout,
) -> dict[str, Any]:
    """Return the arguments of `ServerArgs`; raise ConfigError if the cache is too small."""
    on_cpu = platform.device_name == "cpu"
    length = context_length(options, layout) + NUM_HELD_BACK
    has_tokenizer = (hf_dir / "tokenizer.json").is_file()
    return {
        "model_path": str(hf_dir),
        "json_model_override_args": f'{{"architectures": ["{layout.architecture}"]}}',
        "load_format": "dummy",
        "device": platform.device_name,
        "dtype": dtype,
        "trust_remote_code": False,
        # Else the model's sampling defaults would replace what a request leaves out.
        "sampling_defaults": "openai",
        "sampling_backend": "pytorch",
        # Only structured output needs the tokenizer.
        "skip_tokenizer_init": not has_tokenizer,
        "grammar_backend": "xgrammar" if has_tokenizer else "none",
        "random_seed": 0,
        "context_length": length,
        "max_running_requests": max_num_sequences,
        "max_total_tokens": _num_cache_tokens(hf_dir, options, dtype, on_cpu, length),
        "mem_fraction_static": options.gpu_memory_utilization,
        "max_prefill_tokens": options.max_prefill_tokens,
        "chunked_prefill_size": options.max_prefill_tokens,
        "tp_size": options.tensor_parallel_size,
        "disable_radix_cache": not options.enable_prefix_caching,
        "skip_server_warmup": True,
        # Else its scheduler uses a whole core during training.
        "sleep_on_idle": True,
        "log_level": "warning",
        **(
            {"attention_backend": "torch_native", "disable_overlap_schedule": True}
            if on_cpu
            else {"enable_memory_saver": True}
        ),
    }


def _num_cache_tokens(
    hf_dir: Path, options: SglangOptions, dtype: str, on_cpu: bool, length: int
) -> int | None:
    """Return the tokens that the cache holds; None: what the share of the device leaves."""
    num_bytes = options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    if num_bytes is None:
        return None
    config: Any = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    item_bytes = 4 if dtype == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * num_heads * head_dim * item_bytes
    if num_bytes < length * token_bytes:
        raise ConfigError(
            "rollout.options.kv_cache_bytes",
            f"got {num_bytes}; need {length * token_bytes}, one sample of the whole context; raise "
            "it or lower max_model_len",
        )
    return num_bytes // token_bytes
