"""AdamW on Megatron-Core's distributed optimizer: each data-parallel rank updates its shard.

Main parameters and moments are float32; one-dimensional parameters are not decayed. AdamW is
torch's. Megatron-Core's own saving and loading of state is not used; see `replica`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor, nn

from engines import collectives
from engines.checkpoint.engine_state import AVERAGE
from engines.config.training import OptimizerConfig
from engines.training.host_state import HostState
from engines.training.step.optimizer_step import started_adamw


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a parameter: float32 `main`, from `start` in the flattened parameter."""

    main: Tensor
    start: int
    state: dict[str, Tensor]

    def of(self, whole: Tensor) -> Tensor:
        """Return the flat values of the shard in a tensor of the parameter's shape."""
        return whole.view(-1)[self.start : self.start + self.main.numel()]


class ShardedAdamW:
    """The optimizer of one rank, over the stage's pieces wrapped for gradient reduction.

    Attributes:
        shards: the parts of parameters that this rank updates.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        self._chunks = list(chunks)
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self._made: Any = get_megatron_optimizer(
            settings, cast(Any, self._chunks), use_gloo_process_groups=False
        )
        # One for dense weights, one for experts, which are sharded over other ranks.
        self._parts: list[Any] = [
            part for part in self._made.chained_optimizers if not part.is_stub_optimizer
        ]
        for part in self._parts:
            _detach_shards(part)
            groups = [
                {"params": g["params"], "weight_decay": config.weight_decay * g["wd_mult"]}
                for g in part.optimizer.param_groups
            ]
            part.optimizer = started_adamw(groups, config)
        self.num_steps = 0
        self.shards: dict[nn.Parameter, Shard] = {}
        for part in self._parts:
            models = [*part.model_float16_groups, *part.model_fp32_groups]
            mains = [*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups]
            for parameter, main in zip(chain(*models), chain(*mains), strict=True):
                place = part._get_model_param_range_map(parameter)["param"]
                self.shards[parameter] = Shard(main, place.start, part.optimizer.state[main])

    @property
    def averaged(self) -> list[tuple[Tensor, Tensor]]:
        """Main weights of this rank, each with its average; needs `ema`."""
        return [(shard.main, shard.state[AVERAGE]) for shard in self.shards.values()]

    def share_weights(self) -> None:
        """Copy the main weights to the parameters of all ranks that hold them. Collective."""
        for part in self._parts:
            part._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync()

    def continue_from(self, num_steps: int) -> None:
        """Set the number of steps taken."""
        self.num_steps = num_steps
        for shard in self.shards.values():
            shard.state["step"].fill_(float(num_steps))

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; return the norm before."""
        self._made.prepare_grads()
        grads = [g for part in self._parts for g in part.get_main_grads_for_grad_norm()]
        device = next(self._chunks[0].parameters()).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if grads:
            square += torch.stack([grad.norm() for grad in grads]).double().square().sum()
        collectives.all_reduce(square)
        total = math.sqrt(float(square)) if float(square) >= 0 else math.nan
        scale = max_norm / (total + 1e-6)
        if scale < 1.0:
            for part in self._parts:
                for parameter in part.get_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
        return total

    def step(self, lr: float) -> None:
        """Apply the prepared gradients and all-gather the new weights."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr
        self._made.step_with_ready_grads()
        self.num_steps += 1

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._made.zero_grad()

    def to(self, device: torch.device, host_state: HostState) -> None:
        """Move the moments, and main weights that are not the parameters themselves."""
        moved: list[Tensor] = []
        for parameter, shard in self.shards.items():
            if parameter.dtype != torch.float32:
                moved.append(shard.main)
            moved += [value for value in shard.state.values() if value.dim() > 0]
        host_state.move(moved, device)


def _detach_shards(part: Any) -> None:
    """Replace the float32 shards, which are views of the parameters, by leaves of autograd."""
    leaves: dict[int, Tensor] = {}
    for group in part.shard_fp32_groups:
        for i, main in enumerate(group):
            leaf = main.detach()
            copy_tensor_model_parallel_attributes(leaf, main)
            if hasattr(main, "shared"):
                leaf.shared = main.shared
            leaves[id(main)] = group[i] = leaf
    for group in part.optimizer.param_groups:
        group["params"] = [leaves.get(id(main), main) for main in group["params"]]
