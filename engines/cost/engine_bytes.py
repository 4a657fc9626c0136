"""Weights and key-value cache of a rollout engine, and how many sequences its cache holds."""

from dataclasses import dataclass

from engines.config.plugins import is_embedded
from engines.cost.rank_bytes import dtype_bytes
from engines.cost.workload import SampledWork

_FRACTIONS = {"vllm": 0.9, "sglang": 0.85}
"""Engine -> default of `rollout.options.gpu_memory_utilization`."""


@dataclass(frozen=True)
class EngineBytes:
    """Bytes on each of an engine's `num_devices`; `num_engines` share a step's sequences.

    `sequence` is the cache of the longest one. `num_running` are decoded at a time; at least 1,
    even if that does not fit.
    """

    weights: int
    cache: int
    sequence: int
    num_running: int
    num_engines: int
    num_devices: int


def engine_bytes(
    sampled: SampledWork, num_ranks: int, memory_bytes: int, free_bytes: int
) -> EngineBytes:
    """Return what one engine holds; `num_ranks` have one each, 0: engines have own devices.

    vLLM and SGLang take their fraction of `memory_bytes` at once. The embedded engine caches what
    its sequences need, as far as `free_bytes` allow.
    """
    rollout, shape, number = sampled.rollout, sampled.shape, dtype_bytes(sampled.dtype)
    num_devices, embedded = rollout.num_workers_per_replica, is_embedded(rollout)
    num_engines = num_ranks or (1 if embedded else rollout.num_replicas)
    # Key-value heads are not cut into pieces.
    width = -(-shape.cache_width // min(num_devices, shape.num_kv_heads))
    per_token = width * shape.num_layers * number
    sequence = (sampled.prompt_tokens + sampled.answer_tokens) * per_token
    weights = -(-shape.num_parameters * number // num_devices)
    own = -(-(sampled.num_sequences or rollout.max_num_sequences) // num_engines)
    wanted = min(own, rollout.max_num_sequences)
    default = _FRACTIONS.get(rollout.engine, 0.9)
    fraction = rollout.options.get("gpu_memory_utilization", default)
    taken = rollout.options.get("kv_cache_bytes") or int(fraction * memory_bytes) - weights
    room = free_bytes - weights if embedded else taken
    num_running = max(1, min(wanted, room // sequence))
    cache = num_running * sequence if embedded else max(room, sequence)
    return EngineBytes(weights, cache, sequence, num_running, num_engines, num_devices)
