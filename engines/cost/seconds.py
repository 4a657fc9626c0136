"""Seconds of a step's phases: operations over peak, bytes over rates, times measured shares.

Not counted: scoring, data, checkpoints, the start of engines. Shares were measured on one H200 with
a model of 0.6 B in bfloat16, 256 samples of 128 + 512 tokens, where kernels are short: larger
models come closer to the peak.
"""

from engines.config.plugins import is_embedded
from engines.cost.engine_bytes import EngineBytes
from engines.cost.machines import Machine
from engines.cost.rank_bytes import dtype_bytes, num_micro_batch_tokens, role_bytes
from engines.cost.workload import RoleCost, SampledWork, Workload
from engines.training.step.flops import TrainingFlops

TRAIN_SHARE, COMPILED_SHARE = 0.18, 0.26
"""Share of the peak in training and in passes without gradients: 18 % MFU without recomputation and
149,000 tokens/s of logprobs; 25.8 % with compiled layers."""
COPY_SHARE = 0.8
"""Share of the memory's and of a link's rate that large copies reach."""
EMBEDDED_SHARE, EMBEDDED_S_PER_LAYER = 0.35, 0.7e-3
"""The engine `transformers`: share of the memory's rate (its kernels need 0.16 of 0.44 s), and host
time of one token in one layer (20.6 ms over 28 layers)."""
GRAPH_STEP_S = 8e-3
"""Host time of one token with CUDA graphs (vLLM): 11 ms less the memory's share of it."""
SYNC_S = 0.1
"""Fixed cost of a weight sync."""
_UPDATE_BYTES = 28
"""Bytes that AdamW moves per weight: gradient, weight and moments in float32, read and written."""


def train_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds of a step on the ranks, without sampling and sync."""
    return sum(
        max(_computing_s(role, work, machine), _exchanging_s(role, work, machine))
        + _updating_s(role, work, machine)
        for role in work.roles
    )


def _computing_s(role: RoleCost, work: Workload, machine: Machine) -> float:
    training, one = work.training, [work.sequence_tokens]  # all sequences are equally long
    flops = TrainingFlops(
        role.shape.flops,
        weights_frozen=role.lora is not None,
        layers_recomputed=bool(training.gradient_checkpointing),
        logits_recomputed=not role.shape.has_values,
    )
    passes = role.num_passes * flops.model.forward_flops(one)
    passes += role.num_trained * flops.hardware_flops(one, work.sequence_tokens)
    share = COMPILED_SHARE if training.compiles_layers else TRAIN_SHARE
    rate = machine.peak(training.dtype) * share * training.num_workers
    return work.num_sequences * passes / rate


def _exchanging_s(role: RoleCost, work: Workload, machine: Machine) -> float:
    """Return the seconds of gathering and reducing weights, which overlaps with computing."""
    training = work.training
    if training.backend == "megatron":
        return 0.0
    parts = training.num_workers // training.replicate_size
    whole = role.shape.num_parameters / training.tensor_parallel_size
    gathered = whole * dtype_bytes(training.dtype) * (parts - 1) / parts
    num_shares = training.data_parallel_size * training.num_sharing_ranks
    num_tokens = work.num_sequences * work.sequence_tokens
    num_micro_batches = -(-num_tokens // (num_micro_batch_tokens(work) * num_shares))
    # Twice forward and backward, and gradients of twice the width.
    num_passes = num_micro_batches * (role.num_passes + 4 * role.num_trained)
    return num_passes * gathered / (machine.exchange_bytes_per_s * COPY_SHARE)


def _updating_s(role: RoleCost, work: Workload, machine: Machine) -> float:
    """Return the seconds of the optimizer steps, with moments copied from the host and back."""
    held = role_bytes(role, work.training)
    one = held.gradients / 4 * _UPDATE_BYTES / machine.memory_bytes_per_s
    one += work.training.optimizer_offload * 2 * held.moments / machine.host_link_bytes_per_s
    return work.num_updates * role.num_trained * one / COPY_SHARE


def sync_seconds(sampled: SampledWork, engine: EngineBytes, machine: Machine) -> float:
    """Return the seconds of one weight sync: sent once, copied and checked in memory."""
    num_bytes = sampled.sync_parameters * dtype_bytes(sampled.dtype) / engine.num_devices
    rates = 1 / machine.exchange_bytes_per_s + 4 / machine.memory_bytes_per_s
    return SYNC_S + num_bytes * rates / COPY_SHARE


def sample_seconds(sampled: SampledWork, engine: EngineBytes, machine: Machine) -> float | None:
    """Return the seconds until all samples of a step have their longest length; None if unknown.

    Decoding reads all weights and the cache for each token of the running sequences.
    """
    if sampled.num_sequences is None:
        return None
    shape, answer = sampled.shape, sampled.answer_tokens
    mean_cache = engine.sequence * (1 - answer / (2 * (sampled.prompt_tokens + answer)))
    read = shape.num_read(engine.num_running) * dtype_bytes(sampled.dtype) / engine.num_devices
    read += engine.num_running * mean_cache
    if sampled.rollout.engine == "transformers" or is_embedded(sampled.rollout):
        token_s = read / (machine.memory_bytes_per_s * EMBEDDED_SHARE)
        token_s = max(token_s, EMBEDDED_S_PER_LAYER * shape.num_layers)
    else:
        token_s = read / (machine.memory_bytes_per_s * COPY_SHARE) + GRAPH_STEP_S
    num_sequences = -(-sampled.num_sequences // engine.num_engines)
    num_tokens = max(num_sequences * answer / engine.num_running, answer)
    prefill = num_sequences * shape.flops.forward_flops([sampled.prompt_tokens], 1)
    rate = machine.peak(sampled.dtype) * TRAIN_SHARE * engine.num_devices
    return num_tokens * token_s + prefill / rate
