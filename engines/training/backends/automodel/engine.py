"""The NeMo Automodel engine: Automodel's FSDP2 and tensor parallelism of a transformers module.

Promises: gradients of parameters that tensor-parallel ranks replicate are synchronized once, before
clipping; weights are read as `build_model` says. A single process in another dtype than float32 is
sharded by torch, because Automodel would leave it whole and in float32.
Not covered: Automodel's own model classes, its pipeline, context and expert parallelism, and
adapters or Ulysses together with tensor parallelism. Needs the job environment automodel.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import PreTrainedModel

from engines import collectives
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.options import AutomodelOptions
from engines.training.backends.transformers.build import build_model, decoder_layers
from engines.training.spec import EngineSpec
from engines.training.step.optimizer_step import clip_across_meshes
from infra.errors import ConfigError

_CAUSAL, _VALUE_MODEL = "ForCausalLM", "ForTokenClassification"


class AutomodelEngine(FSDP2Engine):
    """Engine on Automodel's `parallelize_model`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._setup: Any = None

    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        model = build_model(
            self.spec, self._shard if self._is_sharded() else None, load_weights=load_weights
        )
        if self._is_tensor_parallel and self.spec.model_type == "language_model":
            # Every rank computes the same loss from all logits.
            cast(nn.Module, model.get_output_embeddings()).register_forward_hook(_gathered)
        return model

    @property
    def _is_tensor_parallel(self) -> bool:
        return self.spec.training.tensor_parallel_size > 1

    @property
    def _chunked_logprobs(self) -> bool:
        # The chunked head would treat the rank's shard of the vocabulary as all of it.
        return self.spec.training.chunked_logprobs and not self._is_tensor_parallel

    def _shard(self, model: PreTrainedModel) -> None:
        from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
        from nemo_automodel.components.distributed.mesh import ParallelismSizes
        from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

        training = self.spec.training
        precision = MixedPrecisionPolicy(
            param_dtype=self._compute_dtype, reduce_dtype=torch.float32
        )
        if collectives.world_size() == 1:
            for layer in decoder_layers(model):
                fully_shard(layer, mp_policy=precision)
            fully_shard(model, mp_policy=precision, reshard_after_forward=False)
            return
        options = AutomodelOptions.model_validate(training.options)
        self._setup = DistributedSetup.build(
            strategy=FSDP2Config(
                sequence_parallel=training.sequence_parallel,
                tp_plan=_tensor_parallel_plan(model, training.sequence_parallel)
                if self._is_tensor_parallel
                else None,
                mp_policy=precision,
                reshard_after_forward=options.reshard_after_forward,
                enable_fsdp2_prefetch=options.enable_fsdp2_prefetch,
            ),
            parallelism_sizes=ParallelismSizes(
                dp_size=dist.get_world_size() // training.tensor_parallel_size,
                dp_replicate_size=training.replicate_size,
                tp_size=training.tensor_parallel_size,
            ),
        )
        parallelize_model(model, self._setup.mesh_context)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different data."""
        if not self._is_tensor_parallel:
            return super().data_parallel_group
        from nemo_automodel.components.distributed.mesh_utils import get_flat_mesh

        return get_flat_mesh(self._setup.mesh_context.device_mesh, "dp").get_group()

    def loss_factor(self, num_micro_batches: int) -> float:
        """Return the factor that turns FSDP's mean of gradients into a sum."""
        return super().loss_factor(num_micro_batches) / self.spec.training.tensor_parallel_size

    def _clip_gradients(self, max_norm: float) -> float:
        if not self._is_tensor_parallel:
            return super()._clip_gradients(max_norm)
        from nemo_automodel.components.distributed.tp_replicas import (
            synchronize_tp_replica_gradients,
        )

        synchronize_tp_replica_gradients([self.model], self._setup.mesh_context.device_mesh)
        return clip_across_meshes(self.model.parameters(), max_norm)


def _tensor_parallel_plan(model: PreTrainedModel, sequence_parallel: bool) -> dict[str, Any] | None:
    """Return Automodel's plan for the architecture, with a head that sees all tokens.

    Predicted positions are selected before the head by their place in the batch. The head of a
    value model is whole on every rank. None lets Automodel choose.
    """
    from nemo_automodel.components.distributed.optimized_tp_plans import (
        PARALLELIZE_FUNCTIONS,
        SequenceParallelAllGatherActivation,
    )

    kind = type(model)
    is_value_model = kind.__qualname__.endswith(_VALUE_MODEL)
    causal = kind.__qualname__.removesuffix(_VALUE_MODEL) + _CAUSAL if is_value_model else None
    make_plan = PARALLELIZE_FUNCTIONS.get(f"{kind.__module__}.{causal or kind.__qualname__}")
    if make_plan is None:
        if not sequence_parallel and not is_value_model:
            return None
        setting = "tensor_parallel_size" if is_value_model else "sequence_parallel"
        raise ConfigError(
            f"training.{setting}",
            f"automodel has no plan of this parallelism for {kind.__name__}; set it to "
            f"{'1' if is_value_model else 'false'}, or choose another training.backend",
        )
    plan = dict(make_plan(model, sequence_parallel))
    if sequence_parallel:
        plan |= {
            "model.norm": SequenceParallelAllGatherActivation(use_local_output=True),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
    if is_value_model:
        del plan["lm_head"]
    return plan


def _gathered(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.full_tensor() if isinstance(output, DTensor) else output
