"""Process groups of a layout, which Megatron-Core keeps in module globals.

Engines with several layouts can live in one process; each activates its own. Import it inside the
platform's scope for Megatron-Core.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state

from engines import collectives
from engines.training.backends.megatron.layout import Layout

_State = dict[str, Any]
_made: dict[Layout, tuple[Any, _State]] = {}


def _globals() -> _State:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name[1:2].isupper() and name.isupper()
    }


_PRISTINE = _globals()


@dataclass(frozen=True)
class Place:
    """This rank's place in each dimension.

    Attributes:
        context_group: ranks that share sequences.
        data_group: ranks that hold different sequences.
        replica_group: ranks that hold the same dense weights (data x context).
        expert_replica_group: ranks that hold the same experts.
    """

    tensor: int
    context: int
    pipeline: int
    expert: int
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    expert_replica_group: dist.ProcessGroup


def activate(layout: Layout, timeout_s: float) -> None:
    """Make a layout the active one of Megatron-Core. Collective the first time."""
    world = dist.group.WORLD
    made = _made.get(layout)
    if made is not None and made[0] is world:
        parallel_state.__dict__.update(made[1])
        return
    parallel_state.__dict__.update(_PRISTINE)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    collectives.limit_waits(timeout_s)
    _made[layout] = (world, _globals())


def current_place() -> Place:
    """Return this rank's place in the active layout."""
    ps = cast(Any, parallel_state)
    return Place(
        tensor=ps.get_tensor_model_parallel_rank(),
        context=ps.get_context_parallel_rank(),
        pipeline=ps.get_pipeline_model_parallel_rank(),
        expert=ps.get_expert_model_parallel_rank(),
        tensor_group=ps.get_tensor_model_parallel_group(),
        context_group=ps.get_context_parallel_group(),
        pipeline_group=ps.get_pipeline_model_parallel_group(),
        data_group=ps.get_data_parallel_group(),
        replica_group=ps.get_data_parallel_group(with_context_parallel=True),
        expert_replica_group=ps.get_expert_data_parallel_group(),
    )
