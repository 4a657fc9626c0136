"""The FSDP2 engine, on any platform and world size: `fully_shard` of a transformers module.

Gradients are reduced in float32, to shards after every micro-batch. Parameters are sharded over all
ranks or, with hybrid sharding, over the ranks of each of `replicate_size` copies, which all-reduce
once per step. A single process in float32 runs the plain module, without a process group.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from engines import collectives
from engines.training.backends.options import FSDP2Options
from engines.training.backends.transformers.build import build_model, decoder_layers
from engines.training.backends.transformers.engine import TransformersModelEngine


def sharding_mesh(device_name: str, replicate_size: int, timeout_s: float) -> DeviceMesh:
    """Return all ranks in one dimension, or (copies, shards) for hybrid sharding."""
    sizes, names = (collectives.world_size() // replicate_size,), ("shard",)
    if replicate_size > 1:
        sizes, names = (replicate_size, *sizes), ("replicate", *names)
    return collectives.make_mesh(device_name, sizes, names, timeout_s)


class FSDP2Engine(TransformersModelEngine):
    """Engine on torch's `fully_shard`."""

    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        sharded = self._is_sharded()
        return build_model(
            self.spec,
            self._shard if sharded else None,
            load_weights=load_weights,
            weights_on_host=sharded and self._own_options.cpu_offload,
        )

    @property
    def _own_options(self) -> FSDP2Options:
        return FSDP2Options.model_validate(self.spec.training.options)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.training.dtype)

    def _shard(self, model: PreTrainedModel) -> None:
        """Shard one unit per decoder layer, and one for the rest."""
        options = self._own_options
        settings = {
            "mesh": sharding_mesh(
                self.spec.platform.device_name,
                self.spec.training.replicate_size,
                self.spec.training.collective_timeout_s,
            ),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._compute_dtype, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.spec.platform.device_name != "cpu")
            if options.cpu_offload
            else OffloadPolicy(),
        }
        layers = decoder_layers(model)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **settings)
        fully_shard(model, reshard_after_forward=False, **settings)
        for i, layer in enumerate(layers):
            ahead = layers[i + 1 : i + 1 + options.num_prefetched_layers]
            if isinstance(layer, FSDPModule) and ahead:
                layer.set_modules_to_forward_prefetch(
                    [x for x in ahead if isinstance(x, FSDPModule)]
                )
