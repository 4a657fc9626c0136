"""Megatron-Core 0.16.1 without TransformerEngine: what is broken on any machine, and the remedy.

1. Routers of a mixture call `te_general_gemm`, a name that exists only if TransformerEngine does:
   `define_missing_names` defines it.
2. `DistributedOptimizer._set_main_param_and_optimizer_states` looks for `step` among the stored
   tensors, where it is not: KeyError on load.
3. `DistributedOptimizer.load_state_dict` gives every parameter the same `step` tensor, which each
   parameter's update then advances: after a resume Adam's bias correction is wrong, silently.
For 2 and 3 the remedy is not to call them: `ShardedAdamW` holds one counter per parameter and
`checkpoint` fills its tensors in place.
"""

from typing import Any, cast

from megatron.core.transformer.moe import moe_utils


def define_missing_names() -> None:
    """Let routers run without TransformerEngine; harmless when repeated or not needed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        cast(Any, moe_utils).te_general_gemm = None
