"""Weights and key-value cache of a rollout engine, and how many sequences its cache holds."""

from dataclasses import dataclass

from engines.config.plugins import is_embedded
from engines.config.rollout import RolloutConfig
from engines.cost.workload import SampledWork

_FRACTIONS = {"vllm": 0.9, "sglang": 0.85}
"""Engine -> default of `rollout.options.gpu_memory_utilization`."""


@dataclass(frozen=True)
class EngineBytes:
    """One rollout engine, per device.

    Attributes:
        weights, cache: bytes on each device of the engine.
        sequence: cache of the longest sequence.
        num_running: sequences that it decodes at a time; at least 1, even if that does not fit.
        num_engines: engines that share a step's sequences.
        num_devices: devices of one engine.
    """

    weights: int
    cache: int
    sequence: int
    num_running: int
    num_engines: int
    num_devices: int


def cache_bytes_per_token(sampled: SampledWork) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    shape = sampled.shape
    return shape.cache_width * shape.num_layers * _number(sampled)


def engine_bytes(
    sampled: SampledWork, num_ranks: int, memory_bytes: int, free_bytes: int
) -> EngineBytes:
    """Return what one engine holds.

    vLLM and SGLang take their fraction of the device at once. The embedded engine caches what its
    sequences need, as far as memory allows.

    Args:
        num_ranks: training ranks; 0 if the stage only serves, which one replica or more do.
        memory_bytes: of one device; `free_bytes` is what other tenants and the margin leave.
    """
    rollout, shape = sampled.rollout, sampled.shape
    num_devices = rollout.num_workers_per_replica
    is_colocated = rollout.placement == "colocated" and num_ranks > 0
    embedded = is_embedded(rollout)
    num_engines = num_ranks if is_colocated else (1 if embedded else rollout.num_replicas)
    # Key-value heads are not cut into pieces.
    parts = min(num_devices, max(shape.num_kv_heads, 1))
    tokens = sampled.prompt_tokens + sampled.answer_tokens
    sequence = -(-tokens * cache_bytes_per_token(sampled) // parts)
    weights = -(-shape.num_parameters * _number(sampled) // num_devices)
    own = -(-(sampled.num_sequences or rollout.max_num_sequences) // num_engines)
    wanted = min(own, rollout.max_num_sequences)
    if embedded:
        room = free_bytes - weights
        num_running = max(1, min(wanted, room // sequence))
        cache = num_running * sequence
    else:
        cache = _reserved(rollout, memory_bytes, weights)
        num_running = max(1, min(wanted, cache // sequence))
        cache = max(cache, sequence)
    return EngineBytes(weights, cache, sequence, num_running, num_engines, num_devices)


def _reserved(rollout: RolloutConfig, memory_bytes: int, weights: int) -> int:
    options = rollout.options
    if options.get("kv_cache_bytes"):
        return int(options["kv_cache_bytes"])
    fraction = options.get("gpu_memory_utilization", _FRACTIONS.get(rollout.engine, 0.9))
    return int(fraction * memory_bytes) - weights


def _number(sampled: SampledWork) -> int:
    return 2 if sampled.dtype == "bfloat16" else 4
