"""Bytes that a training rank holds on its device, by phase.

Follows the backends: sharding ones (fsdp, fsdp2, veomni, automodel, torchtitan) hold a part of
float32 weights, gradients and moments and gather one layer at a time; Megatron-Core holds its
layers' weights in the compute dtype, their gradients in float32, and a part of main weights and
moments. Frozen models are bfloat16 on accelerators if `training.dtype` is. Offloaded moments are on
the device around the optimizer step alone; sharding backends bring them in parts.

Saved tensors are counted as autograd keeps them in transformers' decoder layers: a norm keeps its
input in float32, its normalized value and its result; attention its query, key, value and result; a
gated feed-forward layer two inner products, the activation and their product. Fused kernels and
compiled layers keep less.
"""

from dataclasses import astuple, dataclass, replace

from engines.config.training import TrainingConfig
from engines.cost.model_shape import ModelShape
from engines.cost.phase_bytes import PhaseBytes
from engines.cost.workload import RoleCost, Workload

_FLOAT = 4
SYNC_BUCKET_BYTES = 256 * 2**20
"""One of the two buckets of a weight sync on the sender's device."""
PARTS_BYTES = 3 * 2**28
"""Offloaded moments on the device at a time: on their way in, in use, and on their way out."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of a number of a recipe's dtype."""
    return 2 if dtype == "bfloat16" else _FLOAT


@dataclass(frozen=True)
class RoleBytes:
    """A model on one rank, in bytes.

    Attributes:
        parameters: weights as they are held all the time.
        moments: Adam's moments and the average of the weights.
        gathered: whole layers and root in the compute dtype, during a forward pass.
        reduced: gradients of whole layers on their way to shards, during a backward pass.
        root_step: the same for the root, when its gradients are reduced after all layers.
    """

    parameters: int
    gradients: int = 0
    moments: int = 0
    gathered: int = 0
    reduced: int = 0
    root_step: int = 0


def role_bytes(role: RoleCost, training: TrainingConfig, *, on_cpu: bool = False) -> RoleBytes:
    """Return what one rank holds of a model; the fullest pipeline stage counts."""
    if training.backend == "megatron":
        return _megatron(role, training)
    shape, number, trained = role.shape, dtype_bytes(training.dtype), role.num_trained_parameters
    is_frozen = role.lora is not None or not trained
    base = _FLOAT if on_cpu or not is_frozen else number
    parts = training.num_workers // training.replicate_size
    held = RoleBytes(
        parameters=-(-(shape.num_parameters * base + is_frozen * trained * _FLOAT) // parts),
        gradients=-(-trained * _FLOAT // parts),
        moments=-(-trained * _FLOAT * (2 + role.keeps_average) // parts),
    )
    if training.options.get("cpu_offload"):
        held = RoleBytes(0)
    if training.num_workers == 1 and training.dtype == "float32":  # the plain module
        return held
    layer, root, whole = (
        part / training.tensor_parallel_size
        for part in (shape.largest_layer, shape.root_parameters, shape.num_parameters)
    )
    keeps_all = training.options.get("reshard_after_forward") is False
    # An adapter's gradients are a part of each layer.
    own_layer, own_root = (trained / shape.num_layers, 0.0) if is_frozen else (layer, root)
    return replace(
        held,
        gathered=int(number * (whole if keeps_all else root + 2 * layer)),
        # In the compute dtype the head's and a layer's; in float32 a layer's, and those of the
        # layer before it, which are being reduced.
        reduced=int(number * (own_root + own_layer) + 2 * _FLOAT * own_layer),
        root_step=int(number * (root + own_root) + _FLOAT * own_root),
    )


def _megatron(role: RoleCost, training: TrainingConfig) -> RoleBytes:
    shape, number = role.shape, dtype_bytes(training.dtype)
    tensor, stages = training.tensor_parallel_size, training.pipeline_parallel_size
    expert_ranks = stages * training.expert_parallel_size
    experts = shape.num_expert_parameters / expert_ranks
    root = max(shape.embedding_parameters, shape.head_parameters)
    layers = shape.num_parameters - shape.num_expert_parameters - shape.root_parameters
    dense = (layers / stages + (root if stages > 1 else shape.root_parameters)) / tensor
    # Ranks that hold the same weights share their main weights and moments.
    share = (dense * tensor * stages + experts * expert_ranks) / training.num_workers
    with_gradient, with_moments = (dense + experts, share) if role.num_trained else (0.0, 0.0)
    if role.lora:
        with_gradient = with_moments = role.num_trained_parameters / (tensor * stages)
    main = _FLOAT if number < _FLOAT else 0
    return RoleBytes(
        parameters=int(number * (dense + experts) + main * with_moments),
        gradients=int(_FLOAT * with_gradient),
        moments=int(_FLOAT * (2 + role.keeps_average) * with_moments),
    )


def num_micro_batch_tokens(work: Workload) -> int:
    """Return the tokens of a micro-batch on one rank: the budget, or all that there are."""
    training = work.training
    num_tokens = work.num_sequences * work.sequence_tokens // work.num_updates
    own = -(-num_tokens // (training.data_parallel_size * training.num_sharing_ranks))
    return min(training.max_tokens_per_micro_batch, own)


def saved_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """Return the saved tensors of a micro-batch of `num_tokens` on one rank, at the peak."""
    layer = num_tokens * _layer_bytes(shape, training)
    head = num_tokens * _head_bytes(shape, training)
    if training.activation_offload:
        return int(max(layer, head))
    if training.gradient_checkpointing:
        # The inputs of all layers, and the head or the layer that is computed again.
        inputs = num_tokens * shape.num_layers * shape.hidden_size * dtype_bytes(training.dtype)
        return int(inputs / _stream_parts(training) + max(layer, head))
    return int(shape.num_layers * layer + head)


def _layer_bytes(shape: ModelShape, training: TrainingConfig) -> float:
    """Return the bytes of one token in the largest layer."""
    number, hidden = dtype_bytes(training.dtype), shape.hidden_size
    is_fused = training.use_liger or training.compiles_layers
    norm = 2 * number if is_fused else _FLOAT + 2 * number
    num_inner = 3 if is_fused else 4
    # The result of a norm of queries and keys is what attention keeps.
    attention = number * shape.attention_width + (norm - number) * shape.norm_width
    if training.backend == "megatron":  # copies queries, keeps one more inner product and angles
        num_inner += 1
        head_dim = shape.cache_width // (2 * shape.num_kv_heads)
        attention += number * (shape.linears["o_proj"][0] + 4 * head_dim)
    inner = number * num_inner * shape.mlp_width
    if shape.num_sparse_layers:
        # A chosen expert has its own copy of the token and its result; the router is float32.
        width = shape.num_chosen * (num_inner * shape.expert_width + 2 * hidden)
        width += num_inner * shape.linears["gate_proj"][1]
        inner = max(inner, number * width + 3 * _FLOAT * shape.num_experts)
    parallel = (attention + inner) / training.tensor_parallel_size
    return 2 * norm * hidden / _stream_parts(training) + parallel


def _stream_parts(training: TrainingConfig) -> int:
    """Return the ranks that share tensors between matrices."""
    return training.tensor_parallel_size if training.sequence_parallel else 1


def _head_bytes(shape: ModelShape, training: TrainingConfig) -> int:
    """Return the bytes of one token in the last norm and the output head."""
    number = dtype_bytes(training.dtype)
    norm = (_FLOAT + 2 * number) * shape.hidden_size
    # Without tiles: logits, their copy in float32, and its gradient.
    logits = 0 if training.chunked_logprobs else (number + 2 * _FLOAT) * shape.vocab_size
    # A head of values works in float32.
    return norm + (_FLOAT * shape.hidden_size if shape.has_values else logits)


def train_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return the largest need of a step's passes and optimizer steps, over all models."""
    training = work.training
    held = [role_bytes(each, training, on_cpu=on_cpu) for each in work.roles]
    peaks = [
        _total([peak, *(_idle(other, training) for other in held if other is not own)])
        for role, own in zip(work.roles, held, strict=True)
        for peak in _peaks_of(role, own, work)
    ]
    return max(peaks, key=lambda each: each.total_bytes)


def _peaks_of(role: RoleCost, held: RoleBytes, work: Workload) -> list[PhaseBytes]:
    """Return what a model needs at each point of its work that can be the peak."""
    training = work.training
    if not role.num_trained:
        return [PhaseBytes(parameter_bytes=held.parameters, bucket_bytes=held.gathered)]
    backward = PhaseBytes(
        parameter_bytes=held.parameters,
        gradient_bytes=held.gradients,
        moment_bytes=0 if training.optimizer_offload else held.moments,
        saved_bytes=saved_bytes(role.shape, training, num_micro_batch_tokens(work)),
        bucket_bytes=held.gathered + held.reduced,
    )
    at_root = replace(backward, saved_bytes=0, bucket_bytes=held.root_step)
    comes_in_parts = training.optimizer_offload and not (
        training.backend == "megatron" or role.keeps_average
    )
    moments = min(held.moments, PARTS_BYTES) if comes_in_parts else held.moments
    return [backward, at_root, replace(at_root, bucket_bytes=0, moment_bytes=moments)]


def _idle(held: RoleBytes, training: TrainingConfig) -> PhaseBytes:
    """Return what a model leaves on the device while another one computes."""
    return PhaseBytes(
        parameter_bytes=0 if training.param_offload else held.parameters,
        moment_bytes=0 if training.optimizer_offload else held.moments,
    )


def sync_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return what ranks hold while they send weights: a gathered tensor and two buckets."""
    policy = role_bytes(work.roles[0], work.training, on_cpu=on_cpu)
    largest = work.roles[0].shape.largest_tensor
    tensor = _FLOAT * largest if policy.gathered else 0
    # A tensor larger than a bucket has memory of its own.
    sent = dtype_bytes(work.training.dtype) * largest
    tensor += sent if sent > SYNC_BUCKET_BYTES else 0
    on_its_way = PhaseBytes(
        parameter_bytes=policy.parameters if work.training.param_offload else 0,
        bucket_bytes=tensor + 2 * SYNC_BUCKET_BYTES,
    )
    return _total([resting_bytes(work, on_cpu=on_cpu), on_its_way])


def resting_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return what ranks hold while engines sample."""
    held = (role_bytes(each, work.training, on_cpu=on_cpu) for each in work.roles)
    return _total([_idle(each, work.training) for each in held])


def state_bytes(work: Workload) -> int:
    """Return what the largest trained model needs on one rank at each optimizer step."""
    trained = (each for each in work.roles if each.num_trained)
    steps = (_peaks_of(each, role_bytes(each, work.training), work)[-1] for each in trained)
    return max((each.total_bytes for each in steps), default=0)


def host_bytes(work: Workload, num_per_node: int) -> int:
    """Return what offloads keep in a node's memory."""
    training = work.training
    on_device = training.model_copy(update={"options": {}})
    has_all = bool(training.options.get("cpu_offload"))
    in_host = sum(
        (has_all or training.param_offload) * held.parameters
        + has_all * held.gradients
        + (has_all or training.optimizer_offload) * held.moments
        for held in (role_bytes(each, on_device) for each in work.roles)
    )
    return in_host * min(num_per_node, training.num_workers)


def _total(parts: list[PhaseBytes]) -> PhaseBytes:
    return PhaseBytes(*(sum(numbers) for numbers in zip(*map(astuple, parts), strict=True)))
