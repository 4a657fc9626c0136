"""Fixes for Megatron-Core 0.16.1 without TransformerEngine.

MoE routers call `te_general_gemm`, which exists only with TransformerEngine: `define_missing_names`
defines it. `DistributedOptimizer` cannot load its state: it raises KeyError for `step`, and
`load_state_dict` gives all parameters one `step` tensor, which breaks Adam's bias correction.
`ShardedAdamW` and `checkpoint` avoid both.
"""

from typing import Any, cast

from megatron.core.transformer.moe import moe_utils


def define_missing_names() -> None:
    """Let routers run without TransformerEngine; may be repeated."""
    if not hasattr(moe_utils, "te_general_gemm"):
        cast(Any, moe_utils).te_general_gemm = None
