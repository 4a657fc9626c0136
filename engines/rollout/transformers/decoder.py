"""Decode step for models with Llama's architecture, written out to launch few kernels.

In transformers' modules the time between operators dominates a decode step. Here projections with
one input are joined, residuals are added in the output products, and rotary angles are looked up.
The logits equal those of the module up to rounding, and the weights are shared with it. Other
architectures, and all prompts, use the modules.
Letters: B rows, C hidden width, N output width, H query heads, G KV heads, D head width, V
vocabulary, L positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.rollout.transformers.attention import DecodeStep, declared_window

ARCHITECTURES = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
})  # fmt: skip
"""Classes of transformers that `Decoder` supports."""
MIN_ANGLES = 256
"""Minimum positions of a rotary table, if the context has as many."""


def is_covered(model: Any) -> bool:
    """True if `Decoder` computes what the model does."""
    return (
        type(model).__name__ in ARCHITECTURES
        and model.config.hidden_act == "silu"
        and len({parameter.dtype for parameter in model.parameters()}) == 1
    )


class Decoder:
    """Decodes with the weights of a covered model, whose projections it joins in memory."""

    def __init__(self, model: Any, context_length: int) -> None:
        inner = model.model
        self._embedding: Tensor = inner.embed_tokens.weight
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._norm = _norm(inner.norm)
        self._head: Tensor = model.lm_head.weight
        self._rotary: nn.Module = inner.rotary_emb
        self._context_length = context_length
        self._angles_2LD = self._embedding.new_empty((2, 0, 0))

    def logits(self, input_ids_B: Tensor, step: DecodeStep) -> Tensor:
        """Return (B, V) logits after one more token of each row; caches its keys and values."""
        self.extend(step.length)
        cos_B1D, sin_B1D = self._angles_2LD.index_select(1, step.position_B)[:, :, None]
        hidden_BC = functional.embedding(input_ids_B, self._embedding)
        for number, layer in enumerate(self._layers):
            hidden_BC = layer(number, hidden_BC, cos_B1D, sin_B1D, step)
        return functional.linear(self._norm(hidden_BC), self._head)

    def extend(self, length: int) -> bool:
        """Look up angles for `length` positions; return True if the table moved for that."""
        if self._angles_2LD.shape[1] >= min(self._context_length, length):
            return False
        # Bounded: a position beyond the context would change the angles of all positions.
        num_angles = min(self._context_length, max(MIN_ANGLES, 2 * length))
        position_L = torch.arange(num_angles, device=self._embedding.device)
        cos_1LD, sin_1LD = self._rotary(self._embedding, position_L[None])
        first, second = sin_1LD.chunk(2, -1)
        # The first half of the sines is negated, for the rotation in `_Layer`.
        self._angles_2LD = torch.cat([cos_1LD, torch.cat([-first, second], -1)])
        return True


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """Return root mean square normalization (Zhang and Sennrich, arXiv:1910.07467)."""
    weight, epsilon = module.weight.data, module.variance_epsilon
    return lambda x: functional.rms_norm(x, weight.shape, weight, epsilon)


class _Linear:
    """Linear layers of the same input, joined into one: weight (N, C), bias (N,) or None.

    The parameters of the modules become views of the joined ones.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.weight = _joined([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        self.bias = _joined(biases) if biases else None

    def __call__(self, x_BC: Tensor) -> Tensor:
        return functional.linear(x_BC, self.weight, self.bias)

    def added_to(self, residual_BN: Tensor, x_BC: Tensor) -> Tensor:
        if self.bias is not None:
            residual_BN = residual_BN + self.bias
        return torch.addmm(residual_BN, x_BC, self.weight.t())


class _Layer:
    """Decodes one layer; `norms_QK` is None unless queries and keys have norms."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.norm_in = _norm(module.input_layernorm)
        self.project_in = _Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.norms_QK = None
        if hasattr(attention, "q_norm"):
            self.norms_QK = _norm(attention.q_norm), _norm(attention.k_norm)
        self.project_out = _Linear(attention.o_proj)
        self.norm_mid = _norm(module.post_attention_layernorm)
        self.gate_up = _Linear(mlp.gate_proj, mlp.up_proj)
        self.down = _Linear(mlp.down_proj)
        self.num_queries = attention.q_proj.out_features // attention.head_dim
        self.num_keys = attention.k_proj.out_features // attention.head_dim
        self.scaling: float = attention.scaling
        self.window = declared_window(attention, attention.layer_idx)

    def __call__(
        self, number: int, hidden_BC: Tensor, cos_B1D: Tensor, sin_B1D: Tensor, step: DecodeStep
    ) -> Tensor:
        """Map (B, C) to (B, C); the angles are (B, 1, D)."""
        num_rows, num_queries, num_keys = len(hidden_BC), self.num_queries, self.num_keys
        heads = self.project_in(self.norm_in(hidden_BC)).view(
            num_rows, num_queries + 2 * num_keys, -1
        )
        turned, values = heads.split([num_queries + num_keys, num_keys], 1)
        if self.norms_QK is not None:
            parts = turned.split([num_queries, num_keys], 1)
            turned = torch.cat([norm(x) for norm, x in zip(self.norms_QK, parts, strict=True)], 1)
        # Rotary embedding (Su et al., arXiv:2104.09864), paired in halves as in Llama.
        halves_swapped = turned.roll(turned.shape[-1] // 2, -1)
        turned = (turned * cos_B1D).addcmul_(halves_swapped, sin_B1D)
        queries, keys = turned.split([num_queries, num_keys], 1)
        seen = step.attend(
            number,
            queries.unsqueeze(2),
            keys.unsqueeze(2),
            values.unsqueeze(2),
            self.scaling,
            self.window,
        )
        hidden_BC = self.project_out.added_to(hidden_BC, seen.view(num_rows, -1))
        gate, up = self.gate_up(self.norm_mid(hidden_BC)).chunk(2, -1)
        return self.down.added_to(hidden_BC, functional.silu(gate, inplace=True).mul_(up))


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Return the concatenated tensor; the parameters become views of it."""
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole
