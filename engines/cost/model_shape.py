"""Sizes and parameter counts of a transformers language model, from its `config.json`.

Promises: counts of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v2 and
deepseek_v3, with Qwen2.5-VL's vision tower, equal those of transformers' own models.
Does not promise: biases and norms of other families, and other vision towers; `uncounted` names
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod
from typing import Any

from engines.config.training import LoraConfig
from engines.training.step.flops import (
    PLAIN_MLP,
    ModelFlops,
    num_experts,
    num_sparse_layers,
    size_in,
)

_QKV_BIAS = ("qwen2",)
"""Beginnings of model types whose query, key and value projections have a bias by themselves."""
_QK_NORM = ("qwen3",)
"""Beginnings of model types with a norm of the width of a head on queries and keys."""
_COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelShape:
    """What memory and time of a model depend on.

    Attributes:
        query_width, key_width, value_width: all heads together, as attention computes them.
        cache_width: numbers that a rollout engine caches of one token in one layer.
        mlp_width: of a dense layer; `expert_width` of one expert.
        num_chosen: experts that a token uses; 0 for a dense model.
        linears: matrices of a dense layer, or of the dense part of a sparse one: name to
            (inputs, outputs).
        layer_parameters: of one dense layer; `sparse_parameters` of a sparse one without experts.
        expert_parameters: of all routed experts of one layer.
        head_parameters: of the output head; 0 if it is the embedding.
        vision_parameters: of the vision tower, 0 without one.
        uncounted: parts that the counts lack, in words.
    """

    flops: ModelFlops
    hidden_size: int
    num_layers: int
    num_sparse_layers: int
    vocab_size: int
    num_outputs: int
    num_heads: int
    num_kv_heads: int
    query_width: int
    key_width: int
    value_width: int
    cache_width: int
    mlp_width: int
    expert_width: int
    num_experts: int
    num_chosen: int
    has_qk_norm: bool
    layer_parameters: int
    sparse_parameters: int
    expert_parameters: int
    embedding_parameters: int
    head_parameters: int
    vision_parameters: int
    linears: Mapping[str, tuple[int, int]] = field(repr=False)
    uncounted: tuple[str, ...] = ()

    @staticmethod
    def from_config(config: Mapping[str, Any], *, values: bool = False) -> "ModelShape":
        """Read `config.json`; with `values` the head has one output (a critic or reward model).

        Raises:
            ValueError: a size is absent or not a positive integer, or a layer type is unknown.
        """
        return _shape_of(config, values)

    @property
    def root_parameters(self) -> int:
        """Parameters outside of layers and vision tower: embedding, head and last norm."""
        return self.embedding_parameters + self.head_parameters + self.hidden_size

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.num_sparse_layers * self.expert_parameters

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        dense = (self.num_layers - self.num_sparse_layers) * self.layer_parameters
        sparse = self.num_sparse_layers * (self.sparse_parameters + self.expert_parameters)
        return self.root_parameters + self.vision_parameters + dense + sparse

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        sparse = self.sparse_parameters + self.expert_parameters if self.num_sparse_layers else 0
        dense = self.layer_parameters if self.num_sparse_layers < self.num_layers else 0
        return max(sparse, dense)

    @property
    def largest_tensor(self) -> int:
        """Numbers in the largest tensor as it is gathered; experts of a layer are one tensor."""
        experts = self.expert_parameters * 2 // 3  # gate and up projections together
        return max(self.embedding_parameters, experts, self.hidden_size * self.mlp_width)

    def num_read(self, num_tokens: int) -> float:
        """Return the parameters that decoding one token of each of `num_tokens` sequences reads.

        Of the routed experts those that some token chose, if all are equally likely.
        """
        plain = self.num_parameters - self.num_expert_parameters - self.vision_parameters
        # The embedding is looked up, not read; a tied one is read as the head.
        plain -= self.embedding_parameters if self.head_parameters else 0
        unused = (1 - self.num_chosen / self.num_experts) ** num_tokens if self.num_experts else 0.0
        return plain + self.num_expert_parameters * (1 - unused)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Return the parameters of an adapter; experts and routers get none."""
        return self.num_layers * sum(
            lora.rank * (inputs + outputs) + (outputs if lora.use_dora else 0)
            for name, (inputs, outputs) in self.linears.items()
            if lora.target_modules == "all-linear" or name in lora.target_modules
        )


def _shape_of(whole: Mapping[str, Any], values: bool) -> ModelShape:
    config = whole.get("text_config") or whole
    model_type = str(config.get("model_type") or whole.get("model_type"))
    flops = ModelFlops.from_config(config, num_outputs=1 if values else None)
    hidden, num_layers = size_in(config, "hidden_size"), size_in(config, "num_hidden_layers")
    num_sparse = num_sparse_layers(config, num_layers)
    heads = size_in(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention, extra, widths = _attention(config, model_type, hidden, heads, kv_heads)
    mlp = size_in(config, "intermediate_size") if num_sparse < num_layers else 0
    names = _MLP[1:] if model_type in PLAIN_MLP else _MLP
    dense = {name: (hidden, mlp) if name != "down_proj" else (mlp, hidden) for name in names}
    bias = sum(outputs for _, outputs in dense.values()) if config.get("mlp_bias") else 0
    each, shared = _experts(config, hidden) if num_sparse else (0, {})
    norms = 2 * hidden + extra
    experts = num_experts(config) if num_sparse else 0
    vocab = size_in(config, "vocab_size")
    head = 0 if whole.get("tie_word_embeddings", config.get("tie_word_embeddings")) else vocab
    vision, uncounted = _vision(whole)
    if not model_type.startswith(_COUNTED):
        uncounted = (*uncounted, f"biases and further norms of {model_type}")
    gates = hidden if config.get("shared_expert_intermediate_size") else 0
    return ModelShape(
        flops=flops,
        hidden_size=hidden,
        num_layers=num_layers,
        num_sparse_layers=num_sparse,
        vocab_size=vocab,
        num_outputs=1 if values else vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **widths,
        mlp_width=mlp,
        expert_width=each // (3 * hidden),
        num_experts=experts,
        num_chosen=size_in(config, "num_experts_per_tok") if num_sparse else 0,
        has_qk_norm=model_type.startswith(_QK_NORM),
        layer_parameters=_total(attention) + _total(dense) + bias + norms,
        sparse_parameters=_total(attention) + _total(shared) + gates + norms + experts * hidden,
        expert_parameters=experts * each,
        embedding_parameters=vocab * hidden,
        head_parameters=hidden + 1 if values else head * hidden,
        vision_parameters=vision,
        linears={**attention, **(shared if num_sparse else dense)},
        uncounted=uncounted,
    )


def _total(linears: Mapping[str, tuple[int, int]]) -> int:
    return sum(prod(sizes) for sizes in linears.values())


def _attention(
    config: Mapping[str, Any], model_type: str, hidden: int, heads: int, kv_heads: int
) -> tuple[dict[str, tuple[int, int]], int, dict[str, int]]:
    """Return the matrices of a layer's attention, its biases and own norms, and its widths."""
    has_bias = bool(config.get("attention_bias"))
    if config.get("kv_lora_rank"):
        rotary, value = size_in(config, "qk_rope_head_dim"), size_in(config, "v_head_dim")
        plain, latent = size_in(config, "qk_nope_head_dim"), size_in(config, "kv_lora_rank")
        query = heads * (plain + rotary)
        low = int(config.get("q_lora_rank") or 0)
        linears = {"q_a_proj": (hidden, low), "q_b_proj": (low, query)} if low else {}
        linears |= {
            **({} if low else {"q_proj": (hidden, query)}),
            "kv_a_proj_with_mqa": (hidden, latent + rotary),
            "kv_b_proj": (latent, heads * (plain + value)),
            "o_proj": (heads * value, hidden),
        }
        bias = (low + latent + rotary + hidden) if has_bias else 0
        cached = latent + rotary
        return linears, bias + low + latent, _widths(query, query, heads * value, cached)
    head_dim = int(config.get("head_dim") or hidden // heads)
    query, key = heads * head_dim, kv_heads * head_dim
    linears = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
    }
    extra = 2 * head_dim if model_type.startswith(_QK_NORM) else 0
    if model_type.startswith(_QKV_BIAS):
        extra += query + 2 * key
    elif has_bias:
        extra += query + 2 * key + hidden
    return linears, extra, _widths(query, key, key, 2 * key)


def _widths(query: int, key: int, value: int, cached: int) -> dict[str, int]:
    return {
        "query_width": query,
        "key_width": key,
        "value_width": value,
        "cache_width": cached,
    }


def _experts(config: Mapping[str, Any], hidden: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the parameters of one routed expert, and the matrices of the shared ones."""
    width = size_in(config, "moe_intermediate_size", "intermediate_size")
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += width * int(config.get("n_shared_experts") or 0)
    matrices = {
        "gate_proj": (hidden, shared),
        "up_proj": (hidden, shared),
        "down_proj": (shared, hidden),
    }
    return 3 * hidden * width, matrices if shared else {}


def _vision(whole: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the parameters of the vision tower, and what is not counted."""
    tower = whole.get("vision_config")
    if not tower:
        return 0, ()
    if not fnmatch(str(whole.get("model_type")), "qwen2_5_vl*"):
        return 0, (f"the vision tower of {whole.get('model_type')}",)
    width, depth = size_in(tower, "hidden_size"), size_in(tower, "depth")
    mlp, out = size_in(tower, "intermediate_size"), size_in(tower, "out_hidden_size")
    patch = prod(int(tower.get(name) or default) for name, default in _PATCH)
    patch *= int(tower.get("patch_size") or 14)
    merged = width * int(tower.get("spatial_merge_size") or 2) ** 2
    attention = 4 * width * width + 4 * width
    block = 2 * width + attention + 3 * width * mlp + 2 * mlp + width
    merger = width + merged * (merged + 1) + merged * out + out
    return patch * width + depth * block + merger, ()


_PATCH = (("in_channels", 3), ("temporal_patch_size", 2), ("patch_size", 14))
