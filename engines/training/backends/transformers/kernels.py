"""Faster passes of a transformers module by Liger's kernels and torch.compile.

Changes only the given model, not transformers' classes. Not covered: attention (see `attention`),
the output head (see `head`), rotary embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from infra.errors import ConfigError

_SETTING = "training.use_liger"
_PLAIN_NORMS = frozenset(
    {"llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Model types whose RMS norm scales by weight, as the kernel does, not by 1 + weight."""


@dataclass(frozen=True)
class FusedKernels:
    """rms_norm(x, weight, eps) = x / rms(x) * weight, and silu_mul(gate, up) = silu(gate) * up."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]


def liger_kernels(device: torch.device) -> FusedKernels:
    """Return Liger's kernels (arXiv:2410.10989).

    Raises:
        ConfigError: the package is not installed, or the device is a CPU.
    """
    if device.type == "cpu":
        raise ConfigError(_SETTING, "got true; Liger's kernels need a GPU; set it to false")
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise ConfigError(
            _SETTING, f"needs Liger ({error}); pip install 'rlhf-pipeline[liger]'"
        ) from error
    # Not in place: the overwritten gradient may be an activation that is still needed.
    return FusedKernels(
        lambda x, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False),
        cast(Any, LigerSiLUMulFunction).apply,
    )


def use_kernels(model: PreTrainedModel, kernels: FusedKernels) -> int:
    """Replace norms and gated feed-forward layers by kernels; return how many.

    Raises:
        ConfigError: the architecture's norm is not known to match the kernel.
    """
    kind = model.config.get_text_config().model_type
    if kind.removesuffix("_text") not in _PLAIN_NORMS:
        known = ", ".join(sorted(_PLAIN_NORMS))
        raise ConfigError(_SETTING, f"got true for a {kind}; need one of {known}; set it to false")
    num_changed = 0
    for module in cast(list[Any], list(model.modules())):
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, kernels)
        elif _is_gated(module):
            module.forward = partial(_gated, module, kernels)
        else:
            continue
        num_changed += 1
    return num_changed


def _is_gated(module: nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in parts) and isinstance(
        getattr(module, "act_fn", None), type(ACT2FN["silu"])
    )


def _norm(module: Any, kernels: FusedKernels, hidden_states: Tensor) -> Tensor:
    return kernels.rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _gated(module: Any, kernels: FusedKernels, x: Tensor) -> Tensor:
    return module.down_proj(kernels.silu_mul(module.gate_proj(x), module.up_proj(x)))


def compile_layers(layers: list[nn.Module], backend: str) -> None:
    """Compile each decoder layer separately; all share one graph, for inputs of any length.

    Recomputation wraps the compiled layer: traced into it, it would prevent compilation.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
