"""`rollout.options` of the engine `vllm`; imported without torch and vLLM."""

from typing import Any

from pydantic import Field, field_validator

from engines.config.base import StrictModel

SET_BY_US = frozenset({
    "block_size", "disable_log_stats", "distributed_executor_backend", "dtype",
    "enable_chunked_prefill", "enable_lora", "enable_prefix_caching", "enable_sleep_mode",
    "enforce_eager", "generation_config", "gpu_memory_utilization",
    "hf_config_path", "hf_overrides", "kv_cache_memory_bytes", "load_format", "logprobs_mode",
    "max_logprobs", "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs", "model", "quantization", "runner", "seed",
    "skip_tokenizer_init", "tensor_parallel_size", "tokenizer", "trust_remote_code", "worker_cls",
    "worker_extension_cls",
})  # fmt: skip
"""Arguments refused in `engine_args`: another option sets them, or the contract needs ours."""


class VllmOptions(StrictModel):
    """`rollout.options` of this engine."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Workers that share one model, each on its own device."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of a device's memory that vLLM may use; no effect where `kv_cache_bytes` is set."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values in bytes; null: 1 GiB on a CPU, else what the fraction leaves."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context length in tokens; null: the model's."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Token budget of one step; raised to the context length where a prefill cannot be split."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens per block of the cache; null: vLLM's default, which is 128 on a CPU."""
    enforce_eager: bool | None = None
    """Disable compilation and CUDA graphs; null: only on a CPU, where compiling rarely pays off."""
    enable_prefix_caching: bool = True
    """Keep keys and values of prompts for later requests."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, by name."""

    @field_validator("engine_args")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(SET_BY_US & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} is set by this engine; remove it from here")
        return value
