"""Bytes that a training rank holds on its device, by phase.

Follows the backends: sharding ones (fsdp, fsdp2, veomni, automodel, torchtitan) hold a part of
float32 weights, gradients and moments and gather one layer at a time; Megatron-Core holds its
layers' weights in the compute dtype, their gradients in float32, and a part of main weights and
moments. Frozen models are bfloat16 on accelerators if `training.dtype` is. Moments that are
offloaded are on the device around the optimizer step alone.
"""

from dataclasses import dataclass, replace

from engines.config.training import TrainingConfig
from engines.cost.model_shape import ModelShape
from engines.cost.phase_bytes import PhaseBytes
from engines.cost.saved_tensors import dtype_bytes, saved_bytes
from engines.cost.workload import RoleCost, Workload

_FLOAT, _MOMENTS = 4, 8
SYNC_BUCKET_BYTES = 64 * 2**20
"""One of the two buckets of a weight sync."""


@dataclass(frozen=True)
class RoleBytes:
    """A model on one rank, in bytes.

    Attributes:
        parameters: weights as they are held all the time.
        moments: Adam's moments and the average of the weights.
        gathered: whole layers and root in the compute dtype, during a forward pass.
        reduced: gradients of whole layers on their way to shards, during a backward pass.
        root_step: the same for the root, when its gradients are reduced after all layers.
        tensor: the largest tensor, as a sync gathers it.
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    reduced: int
    root_step: int
    tensor: int


def num_micro_batch_tokens(work: Workload) -> int:
    """Return the tokens of a micro-batch on one rank: the budget, or all that there are."""
    training = work.training
    num_tokens = work.num_sequences * work.sequence_tokens // max(work.num_updates, 1)
    own = -(-num_tokens // (training.data_parallel_size * training.num_sharing_ranks))
    return min(training.max_tokens_per_micro_batch, own)


def role_bytes(role: RoleCost, training: TrainingConfig, *, on_cpu: bool = False) -> RoleBytes:
    """Return what one rank holds of a model; the fullest pipeline stage counts."""
    if training.backend == "megatron":
        return _megatron(role, training)
    shape, number = role.shape, dtype_bytes(training)
    world = training.num_workers
    is_sharded = world > 1 or training.dtype != "float32"
    parts = world // training.replicate_size
    trained, base = _trained(role), _FLOAT
    if not role.num_trained or role.lora:
        base = _FLOAT if on_cpu else number
    weights = shape.num_parameters * base + (trained * _FLOAT if role.lora else 0)
    moments = _MOMENTS + (_FLOAT if role.keeps_average else 0)
    layer = shape.largest_layer / training.tensor_parallel_size
    root = shape.root_parameters / training.tensor_parallel_size
    whole = shape.num_parameters / training.tensor_parallel_size
    keeps = training.options.get("reshard_after_forward") is False
    own_layer, own_root = layer, root
    if role.lora:
        own_layer, own_root = trained / shape.num_layers, 0.0
    found = RoleBytes(
        parameters=-(-weights // parts),
        gradients=-(-trained * _FLOAT // parts),
        moments=-(-trained * moments // parts),
        gathered=int(number * (whole if keeps else root + 2 * layer)) if is_sharded else 0,
        # In the compute dtype: the head's and a layer's; in float32: a layer's, and the one before
        # it, which is being reduced.
        reduced=int(number * (own_root + own_layer) + 2 * _FLOAT * own_layer) if is_sharded else 0,
        root_step=int(number * (root + own_root) + _FLOAT * own_root) if is_sharded else 0,
        tensor=shape.largest_tensor * _FLOAT if is_sharded else 0,
    )
    if training.options.get("cpu_offload"):
        return replace(found, parameters=0, gradients=0, moments=0)
    return found


def _trained(role: RoleCost) -> int:
    if not role.num_trained:
        return 0
    return role.shape.adapter_parameters(role.lora) if role.lora else role.shape.num_parameters


def _megatron(role: RoleCost, training: TrainingConfig) -> RoleBytes:
    shape, number = role.shape, dtype_bytes(training)
    tensor, stages = training.tensor_parallel_size, training.pipeline_parallel_size
    experts = shape.num_expert_parameters / (stages * training.expert_parallel_size)
    root = max(shape.embedding_parameters, shape.head_parameters)
    root = root if stages > 1 else shape.root_parameters
    layers = shape.num_parameters - shape.num_expert_parameters - shape.root_parameters
    dense = (layers / stages + root) / tensor
    # Ranks that hold the same weights share their main weights and moments.
    dense_parts = training.num_workers / (tensor * stages)
    expert_parts = training.num_workers / (stages * training.expert_parallel_size)
    share = dense / dense_parts + experts / expert_parts
    held = dense + experts
    if role.lora:
        held, share = (_trained(role) / (tensor * stages),) * 2
    main = 0 if number == _FLOAT else _FLOAT
    moments = _MOMENTS + (_FLOAT if role.keeps_average else 0)
    is_trained = role.num_trained > 0
    return RoleBytes(
        parameters=int(number * (dense + experts) + is_trained * main * share),
        gradients=int(is_trained * _FLOAT * held),
        moments=int(is_trained * moments * share),
        gathered=0,
        reduced=0,
        root_step=0,
        tensor=shape.largest_tensor * number,
    )


def idle_bytes(held: RoleBytes, training: TrainingConfig) -> PhaseBytes:
    """Return what a model leaves on the device while another one computes."""
    return PhaseBytes(
        parameter_bytes=0 if training.param_offload else held.parameters,
        moment_bytes=0 if training.optimizer_offload else held.moments,
    )


def train_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return the largest need of a step's passes and optimizer steps, over all models."""
    training = work.training
    held = [role_bytes(each, training, on_cpu=on_cpu) for each in work.roles]
    num_tokens = num_micro_batch_tokens(work)
    peaks: list[PhaseBytes] = []
    for index, role in enumerate(work.roles):
        others = [idle_bytes(each, training) for i, each in enumerate(held) if i != index]
        for own in _peaks_of(held[index], role.shape, training, num_tokens, role.num_trained > 0):
            peaks.append(total([own, *others]))
    return max(peaks, key=lambda each: each.total_bytes)


def _peaks_of(
    held: RoleBytes, shape: ModelShape, training: TrainingConfig, num_tokens: int, trains: bool
) -> list[PhaseBytes]:
    """Return what a model needs at each point of its work that can be the peak."""
    if not trains:
        return [PhaseBytes(parameter_bytes=held.parameters, bucket_bytes=held.gathered)]
    resting = 0 if training.optimizer_offload else held.moments
    backward = PhaseBytes(
        parameter_bytes=held.parameters,
        gradient_bytes=held.gradients,
        moment_bytes=resting,
        saved_bytes=saved_bytes(shape, training, num_tokens),
        bucket_bytes=held.gathered + held.reduced,
    )
    at_root = replace(backward, saved_bytes=0, bucket_bytes=held.root_step)
    step = replace(at_root, bucket_bytes=0, moment_bytes=held.moments)
    return [backward, at_root, step]


def sync_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return what ranks hold while they send weights: a gathered tensor and two buckets."""
    training = work.training
    policy, *others = [role_bytes(each, training, on_cpu=on_cpu) for each in work.roles]
    sending = PhaseBytes(
        parameter_bytes=policy.parameters,
        moment_bytes=0 if training.optimizer_offload else policy.moments,
        bucket_bytes=policy.tensor + 2 * SYNC_BUCKET_BYTES,
    )
    return total([sending, *(idle_bytes(each, training) for each in others)])


def resting_bytes(work: Workload, *, on_cpu: bool = False) -> PhaseBytes:
    """Return what ranks hold while engines sample."""
    held = [role_bytes(each, work.training, on_cpu=on_cpu) for each in work.roles]
    return total([idle_bytes(each, work.training) for each in held])


def state_bytes(work: Workload) -> int:
    """Return weights, gradients and moments of the largest trained model on one rank.

    Nothing but sharding over more ranks or training fewer weights makes them smaller.
    """
    if work.training.options.get("cpu_offload"):
        return 0
    held = [role_bytes(each, work.training) for each in work.roles if each.num_trained]
    return max((h.parameters + h.gradients + h.moments for h in held), default=0)


def host_bytes(work: Workload, num_per_node: int) -> int:
    """Return what the offloads keep in a node's memory."""
    training = work.training
    held = [role_bytes(each, training) for each in work.roles]
    params = sum(each.parameters for each in held) if training.param_offload else 0
    moments = sum(each.moments for each in held) if training.optimizer_offload else 0
    if training.options.get("cpu_offload"):
        on_device = training.model_copy(update={"options": {}})
        each_held = [role_bytes(each, on_device) for each in work.roles]
        params = sum(h.parameters + h.gradients + h.moments for h in each_held)
    return (params + moments) * min(num_per_node, training.num_workers)


def total(parts: list[PhaseBytes]) -> PhaseBytes:
    """Return the sum of each field."""
    names = parts[0].__dataclass_fields__
    return PhaseBytes(**{name: sum(getattr(each, name) for each in parts) for name in names})
