"""A TorchTitan decoder sharded over the ranks, with undefined weights.

Import it inside the platform's scope for TorchTitan.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3

from engines.training.backends.torchtitan.model import decoder_config
from engines.training.spec import EngineSpec

_SPMD_BACKEND = "partial_dtensor"
"""TorchTitan's form of tensor parallelism whose parameters are DTensors."""


def sharded_decoder(spec: EngineSpec, reshard_after_forward: str) -> tuple[nn.Module, list[str]]:
    """Build and shard the decoder; return it and its parameters' hub names. Collective."""
    training, device = spec.training, spec.platform.device()
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=training.replicate_size,
        tensor_parallel_degree=training.tensor_parallel_size,
        enable_sequence_parallel=training.sequence_parallel,
        spmd_backend=_SPMD_BACKEND,
    )
    config = decoder_config(spec.hf_dir, sequence_parallel=training.sequence_parallel)
    set_spmd_backend(_SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    hub_names = _hub_names(model, Qwen3StateDictAdapter(config, None))
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=FullAC.Config() if training.gradient_checkpointing else None,
        dump_folder="",
        skip_dp=True,
    )
    # Tensor parallelism unties tied weights. FSDP would treat them as two, and update only one
    # of them if the shards are uneven.
    _tie(model)
    replicate = ["dp_replicate"] if training.replicate_size > 1 else []
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh([*replicate, "fsdp"]),
        param_dtype=getattr(torch, training.dtype),
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=reshard_after_forward,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum: gloo lacks the scaled sum that TorchTitan requests.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    _tie(model)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    return model, hub_names


def _hub_names(model: nn.Module, adapter: Any) -> list[str]:
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in adapter.to_hf(dict(named)).items()}
    return [names[id(parameter)] for parameter in named.values()]


def _tie(model: Any) -> None:
    """Tie the head's weight to the embedding, so that FSDP sees one parameter."""
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight
