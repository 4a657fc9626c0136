"""Seconds of a step's phases: operations over peak, bytes over rates, times measured shares.

Not counted: scoring, data, checkpoints, the start of engines. Shares were measured on one H200 with
a model of 0.6 B in bfloat16, 256 samples of 128 + 512 tokens, where kernels are short: larger
models come closer to the peak.
"""

from collections.abc import Mapping

from engines.config.plugins import is_embedded
from engines.cost.engine_bytes import EngineBytes, cache_bytes_per_token
from engines.cost.machines import Machine
from engines.cost.rank_bytes import num_micro_batch_tokens, role_bytes
from engines.cost.saved_tensors import dtype_bytes
from engines.cost.workload import RoleCost, SampledWork, Workload
from engines.training.step.flops import TrainingFlops

TRAIN_SHARE, COMPILED_SHARE = 0.18, 0.26
"""Share of the peak in training and in passes without gradients: 18 % MFU without recomputation and
149,000 tokens/s of logprobs; 25.8 % with compiled layers."""
MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that large copies and matrix-vector products reach."""
EMBEDDED_MEMORY_SHARE = 0.35
"""The same for the engine `transformers`: its kernels need 0.16 of 0.44 s, at 20.6 ms a token."""
LAUNCH_S_PER_LAYER = 0.7e-3
"""Host time of one token in one layer of `transformers`: 20.6 ms over 28 layers."""
GRAPH_STEP_S = 8e-3
"""Host time of one token with CUDA graphs (vLLM): 11 ms less the memory's share of it."""
LINK_SHARE = 0.8
"""Share of a link's rate that large transfers reach."""
SYNC_S = 0.1
"""Fixed cost of a weight sync."""
_READ_AND_WRITTEN = 28
"""Bytes that AdamW moves per weight: gradient, weight and moments in float32, read and written."""


def train_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds of a step on the ranks, without sampling and sync."""
    return sum(_role_seconds(role, work, machine) for role in work.roles)


def _role_seconds(role: RoleCost, work: Workload, machine: Machine) -> float:
    training = work.training
    lengths = [work.sequence_tokens] * work.num_sequences
    num_tokens = sum(lengths)
    flops = TrainingFlops(
        role.shape.flops,
        weights_frozen=role.lora is not None,
        layers_recomputed=training.gradient_checkpointing,
        logits_recomputed=role.shape.num_outputs > 1,
    )
    # All sequences are equally long, so one of them is counted.
    count, one = len(lengths), lengths[:1]
    passes = role.num_passes * count * flops.model.forward_flops(one)
    trained = role.num_trained * count * flops.hardware_flops(one, work.sequence_tokens)
    share = COMPILED_SHARE if training.use_torch_compile else TRAIN_SHARE
    peak = peak_flops_per_s(machine, training.dtype)
    computing = (passes + trained) / (peak * share * training.num_workers)
    per_pass = num_micro_batch_tokens(work) * training.data_parallel_size
    per_pass *= training.num_sharing_ranks
    num_micro_batches = -(-num_tokens // per_pass)
    exchanged = _exchanged_bytes(role, work)
    num_passes = role.num_passes + 3 * role.num_trained
    moved = num_micro_batches * num_passes * exchanged
    exchanging = moved / (machine.exchange_bytes_per_s * LINK_SHARE)
    return max(computing, exchanging) + _update_seconds(role, work, machine)


def _exchanged_bytes(role: RoleCost, work: Workload) -> float:
    """Return the bytes that a rank receives to gather all weights once."""
    training = work.training
    if training.backend == "megatron" or training.num_workers == 1:
        return 0.0
    parts = training.num_workers // training.replicate_size
    own = role.shape.num_parameters / training.tensor_parallel_size
    return own * dtype_bytes(training) * (parts - 1) / parts


def _update_seconds(role: RoleCost, work: Workload, machine: Machine) -> float:
    """Return the seconds of the optimizer steps, with moments copied from the host and back."""
    if not role.num_trained:
        return 0.0
    held = role_bytes(role, work.training)
    one = held.gradients / 4 * _READ_AND_WRITTEN / (machine.memory_bytes_per_s * MEMORY_SHARE)
    if work.training.optimizer_offload:
        one += 2 * held.moments / (machine.host_link_bytes_per_s * LINK_SHARE)
    return one * work.num_updates * role.num_trained


def peak_flops_per_s(machine: Machine, dtype: str) -> float:
    """Return the peak of a dtype; the smallest known one for a dtype without a figure."""
    peaks: Mapping[str, float] = machine.peak_flops_per_s
    return peaks.get(dtype) or min(peaks.values())


def sync_seconds(sampled: SampledWork, engine: EngineBytes, machine: Machine) -> float:
    """Return the seconds of one weight sync: sent once, copied and checked in memory."""
    number = 2 if sampled.dtype == "bfloat16" else 4
    num_bytes = sampled.sync_parameters * number / engine.num_devices
    sending = num_bytes / (machine.exchange_bytes_per_s * LINK_SHARE)
    return SYNC_S + sending + 4 * num_bytes / (machine.memory_bytes_per_s * MEMORY_SHARE)


def sample_seconds(
    sampled: SampledWork, engine: EngineBytes, machine: Machine
) -> float | None:  # fmt: skip
    """Return the seconds until all samples of a step have their longest length; None if unknown.

    Decoding reads all weights and the cache for each token of the running sequences.
    """
    if sampled.num_sequences is None:
        return None
    shape, devices = sampled.shape, engine.num_devices
    number = 2 if sampled.dtype == "bfloat16" else 4
    running = engine.num_running
    num_sequences = -(-sampled.num_sequences // engine.num_engines)
    mean_tokens = sampled.prompt_tokens + sampled.answer_tokens / 2
    read = shape.num_read(running) * number / devices
    read += running * mean_tokens * cache_bytes_per_token(sampled) / devices
    embedded = is_embedded(sampled.rollout) or sampled.rollout.engine == "transformers"
    share = EMBEDDED_MEMORY_SHARE if embedded else MEMORY_SHARE
    token_s = read / (machine.memory_bytes_per_s * share)
    if embedded:
        token_s = max(token_s, LAUNCH_S_PER_LAYER * shape.num_layers)
    else:
        token_s += GRAPH_STEP_S
    num_steps = num_sequences * sampled.answer_tokens / running
    prefill = num_sequences * shape.flops.forward_flops([sampled.prompt_tokens], 1)
    rate = peak_flops_per_s(machine, sampled.dtype) * TRAIN_SHARE * devices
    return max(num_steps, sampled.answer_tokens) * token_s + prefill / rate
