"""The training engine `example_engine`: every rank holds the whole model and different data.

`TransformersModelEngine` does the work; what is left to a backend is how the model is built, and
how gradients meet. Here they are summed over the ranks once per step, before they are clipped.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines import collectives
from engines.training.backends.transformers.build import build_model
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.types import ModelOutputs, Readouts, TokenBatch
from example_chip.options import ExampleOptions


class ExampleEngine(TransformersModelEngine):
    """Replicated data parallelism, for language and value models."""

    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        return build_model(self.spec, None, load_weights=load_weights)

    def loss_factor(self, num_micro_batches: int) -> float:
        """Nothing to undo: gradients are summed, over micro-batches and over ranks."""
        return 1.0

    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        dtype = getattr(torch, self.spec.training.dtype)
        device_type = self.spec.platform.device().type
        with torch.autocast(device_type, dtype, enabled=dtype != torch.float32):
            return super()._forward(batch, readouts)

    def _clip_gradients(self, max_norm: float) -> float:
        if collectives.world_size() > 1:
            self._sum_gradients()
        return super()._clip_gradients(max_norm)

    def _sum_gradients(self) -> None:
        options = ExampleOptions.model_validate(self.spec.training.options)
        bucket: list[Tensor] = []
        size_bytes = 0
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                # Another rank may have used it; every rank runs the same collectives.
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            size_bytes += parameter.grad.nbytes
            if size_bytes >= options.bucket_size_mb * 10**6:
                _sum_bucket(bucket)
                bucket, size_bytes = [], 0
        if bucket:
            _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    collectives.all_reduce(flat)
    for gradient, summed in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(summed.view_as(gradient))
