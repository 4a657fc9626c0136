"""`rollout.options` of the engine `sglang`; imported without torch and SGLang."""

from typing import Any

from pydantic import Field, field_validator

from engines.config.base import StrictModel

NUM_HELD_BACK = 8
"""Context tokens that SGLang reserves, by which it would silently cut `max_new_tokens`."""
SET_BY_US = frozenset({
    "admin_api_key", "api_key", "attention_backend", "chunked_prefill_size", "context_length",
    "custom_weight_loader", "device", "disable_overlap_schedule", "disable_radix_cache", "dp_size",
    "dtype", "enable_memory_saver", "grammar_backend", "host", "json_model_override_args",
    "load_format", "log_level", "max_prefill_tokens", "max_running_requests", "max_total_tokens",
    "mem_fraction_static", "model_path", "nnodes", "port", "pp_size", "random_seed",
    "sampling_backend", "sampling_defaults", "skip_server_warmup", "skip_tokenizer_init",
    "sleep_on_idle", "speculative_algorithm", "tokenizer_path", "tp_size", "trust_remote_code",
})  # fmt: skip
"""Arguments refused in `server_args`: another option sets them, or the contract needs ours."""


class SglangOptions(StrictModel):
    """`rollout.options` of this engine; options shared with vLLM have the same names."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=1)
    """Processes that share one model; must be 1, since weights reach one process per replica."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Fraction of a device's memory for weights and cache; no effect on a CPU."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values in bytes; null: 1 GiB on a CPU, else what the fraction leaves."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context length in tokens; null: the model's."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Token budget of one step; longer prompts are computed in several."""
    enable_prefix_caching: bool = True
    """Keep keys and values of prompts for later requests."""
    server_args: dict[str, Any] = {}
    """Further arguments of SGLang's `ServerArgs`, by name."""

    @field_validator("server_args")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(SET_BY_US & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} is set by this engine; remove it from here")
        return value
