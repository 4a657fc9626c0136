"""Sizes and parameter counts of a transformers language model, from its `config.json`.

Promises: counts of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v2 and
deepseek_v3, with Qwen2.5-VL's vision tower, equal those of transformers' own models.
Does not promise: biases and norms of other families, and other vision towers; `uncounted` names
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.config.training import LoraConfig
from engines.training.step.flops import (
    Matrices,
    ModelFlops,
    attention_matrices,
    expert_width,
    mlp_matrices,
    num_experts,
    num_gate_weights,
    num_kv_heads,
    num_sparse_layers,
    num_weights,
    query_width,
    shared_matrices,
    size_in,
)

_QKV_BIAS = ("qwen2",)
"""Beginnings of model types whose query, key and value projections have a bias by themselves."""
_QK_NORM = ("qwen3",)
"""Beginnings of model types with a norm of the width of a head on queries and keys."""
_COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class ModelShape:
    """What memory and time of a model depend on.

    Attributes:
        attention_width: numbers of one token that attention's backward pass needs in one layer:
            query, key, value and result. `norm_width` of these have a norm of their own.
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
    has_values: bool
    num_kv_heads: int
    attention_width: int
    norm_width: int
    cache_width: int
    mlp_width: int
    expert_width: int
    num_experts: int
    num_chosen: int
    layer_parameters: int
    sparse_parameters: int
    expert_parameters: int
    embedding_parameters: int
    head_parameters: int
    vision_parameters: int
    linears: Matrices = field(repr=False)
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
        sparse = self.num_sparse_layers * self.sparse_parameters + self.num_expert_parameters
        return self.root_parameters + self.vision_parameters + dense + sparse

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        sparse = self.sparse_parameters + self.expert_parameters
        return sparse if self.num_sparse_layers else self.layer_parameters

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
    hidden, num_layers = size_in(config, "hidden_size"), size_in(config, "num_hidden_layers")
    vocab, attention = size_in(config, "vocab_size"), attention_matrices(config)
    extra, attention_width, norm_width, cache_width = _attention(config, model_type, attention)
    num_sparse = num_sparse_layers(config, num_layers)
    mlp = size_in(config, "intermediate_size") if num_sparse < num_layers else 0
    dense, shared = mlp_matrices(config, mlp), shared_matrices(config)
    bias = sum(outputs for _, outputs in dense.values()) if config.get("mlp_bias") else 0
    each, experts = (expert_width(config), num_experts(config)) if num_sparse else (0, 0)
    tied = whole.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    plain = num_weights(attention) + extra + 2 * hidden
    vision, uncounted = _vision(whole)
    further = f"biases and further norms of {model_type} are not counted"
    return ModelShape(
        flops=ModelFlops.from_config(config, num_outputs=1 if values else None),
        hidden_size=hidden,
        num_layers=num_layers,
        num_sparse_layers=num_sparse,
        vocab_size=vocab,
        has_values=values,
        num_kv_heads=num_kv_heads(config),
        attention_width=attention_width,
        norm_width=norm_width,
        cache_width=cache_width,
        mlp_width=mlp,
        expert_width=each,
        num_experts=experts,
        num_chosen=size_in(config, "num_experts_per_tok") if num_sparse else 0,
        layer_parameters=plain + num_weights(dense) + bias,
        sparse_parameters=(
            plain + num_weights(shared) + num_gate_weights(config) + experts * hidden
        ),
        expert_parameters=experts * 3 * hidden * each,
        embedding_parameters=vocab * hidden,
        head_parameters=hidden + 1 if values else (0 if tied else vocab * hidden),
        vision_parameters=vision,
        linears={**attention, **(shared if num_sparse else dense)},
        uncounted=uncounted if model_type.startswith(_COUNTED) else (*uncounted, further),
    )


def _attention(
    config: Mapping[str, Any], model_type: str, attention: Matrices
) -> tuple[int, int, int, int]:
    """Return parameters of biases and own norms, then the widths: attention, norm and cache."""
    query, bias = query_width(attention), bool(config.get("attention_bias"))
    value, hidden = attention["o_proj"]
    if "kv_b_proj" in attention:
        joint, normed = attention["kv_a_proj_with_mqa"][1], attention["kv_b_proj"][0]
        low = int(config.get("q_lora_rank") or 0)
        extra = low + normed + bias * (low + joint + hidden)
        return extra, 2 * (query + value), low + normed, joint
    key, has_norm = attention["k_proj"][1], model_type.startswith(_QK_NORM)
    num_biases = bias * (query + 2 * key + hidden)
    num_biases += model_type.startswith(_QKV_BIAS) * (query + 2 * key)
    norms = 2 * has_norm * query // size_in(config, "num_attention_heads")
    return num_biases + norms, 2 * (query + key), has_norm * (query + key), 2 * key


def _vision(whole: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the parameters of the vision tower, and what is not counted."""
    tower, kind = whole.get("vision_config"), str(whole.get("model_type"))
    if not tower or not kind.startswith("qwen2_5_vl"):
        return 0, (f"the vision tower of {kind} is not counted",) if tower else ()
    width, mlp = size_in(tower, "hidden_size"), size_in(tower, "intermediate_size")
    patches = 3 * 2 * size_in(tower, "patch_size") ** 2 * width  # two frames of three colours
    merged = width * size_in(tower, "spatial_merge_size") ** 2  # a square of patches
    block = 2 * width + 4 * width * (width + 1) + 3 * width * mlp + 2 * mlp + width
    merger = width + (merged + 1) * (merged + size_in(tower, "out_hidden_size"))
    return patches + size_in(tower, "depth") * block + merger, ()
