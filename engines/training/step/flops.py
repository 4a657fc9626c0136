"""Floating-point operations of a transformers language model, from its `config.json`.

Counts matrix products of dense and mixture-of-experts decoders, and attention scores (causal,
sliding windows; latent attention as in arXiv:2405.04434). One multiply-add is two operations.
Element-wise work and vision or audio towers are not counted; layers without softmax attention are
refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from engines.attention_needs import LAYER_TYPES, layer_windows

Matrices = Mapping[str, tuple[int, int]]
"""Names of matrices, with their inputs and outputs."""
PLAIN_MLP = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose feed-forward layer has two matrices, not three."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a model's forward pass, as a function of sequence lengths.

    Attributes:
        layers_per_token: operations of one token in all layers, without attention scores.
        attention_per_pair: operations of one query-key pair in one layer.
        windows: (tokens a query sees at most, None for all; number of such layers).
    """

    layers_per_token: float
    head_per_token: float
    attention_per_pair: float
    windows: tuple[tuple[int | None, int], ...]

    @staticmethod
    def from_config(config: Mapping[str, Any], *, num_outputs: int | None = None) -> "ModelFlops":
        """Read `config.json`; `num_outputs` replaces the vocabulary as width of the head.

        Raises:
            ValueError: a size is absent or not a positive integer, or a layer type is unknown.
        """
        config = config.get("text_config") or config
        hidden_size, attention = size_in(config, "hidden_size"), attention_matrices(config)
        num_layers = size_in(config, "num_hidden_layers")
        sparse = num_sparse_layers(config, num_layers)
        weights = num_layers * num_weights(attention)
        if sparse < num_layers:
            dense = mlp_matrices(config, size_in(config, "intermediate_size"))
            weights += (num_layers - sparse) * num_weights(dense)
        if sparse:
            chosen = 3 * expert_width(config) * size_in(config, "num_experts_per_tok")
            weights += sparse * hidden_size * (num_experts(config) + chosen)
            weights += sparse * (num_weights(shared_matrices(config)) + num_gate_weights(config))
        head = size_in(config, "vocab_size") if num_outputs is None else num_outputs
        unknown = sorted({*(config.get("layer_types") or ())} - LAYER_TYPES)
        if unknown:
            raise ValueError(f"layer_types: got {unknown[0]!r}; its operations are not known here")
        return ModelFlops(
            layers_per_token=2.0 * weights,
            head_per_token=2.0 * hidden_size * head,
            attention_per_pair=2.0 * (query_width(attention) + attention["o_proj"][0]),
            windows=tuple(Counter(layer_windows(config, num_layers)).items()),
        )

    def sequence_costs(self, lengths: Sequence[int]) -> list[float]:
        """Return the forward operations of each sequence, to balance micro-batches."""
        per_token = self.layers_per_token + self.head_per_token
        return [length * per_token + self._attention(length) for length in lengths]

    def forward_flops(self, lengths: Sequence[int], num_predicted: int | None = None) -> float:
        """Return the operations of a forward pass; None predicts all tokens."""
        num_predicted = sum(lengths) if num_predicted is None else num_predicted
        return self.layer_flops(lengths) + self.head_per_token * num_predicted

    def layer_flops(self, lengths: Sequence[int]) -> float:
        """Return the forward operations without the output head."""
        return sum(n * self.layers_per_token + self._attention(n) for n in lengths)

    def _attention(self, length: int) -> float:
        """Return the operations of one sequence's scores; a causal mask halves the square."""
        pairs = 0.0
        for window, num_layers in self.windows:
            seen = length if window is None else min(window, length)
            pairs += num_layers * (seen * length - seen * seen / 2)
        return self.attention_per_pair * pairs


@dataclass(frozen=True)
class TrainingFlops:
    """Operations of forward and backward passes, as an engine runs them.

    With `weights_frozen`, an adapter is trained, whose own products (a few percent) are not
    counted, and there are no gradients of weights.
    """

    model: ModelFlops
    weights_frozen: bool = False
    layers_recomputed: bool = False
    logits_recomputed: bool = False

    def model_flops(self, lengths: Sequence[int], num_predicted: int) -> float:
        """Return the operations that a step needs, the numerator of MFU (arXiv:2204.02311).

        They are those of three forward passes. With frozen weights two, except for attention
        scores, which are products of activations and still count three times.
        """
        whole = 3.0 * self.model.forward_flops(lengths, num_predicted)
        if not self.weights_frozen:
            return whole
        gradients = self.model.layers_per_token * sum(lengths)
        return whole - gradients - self.model.head_per_token * num_predicted

    def hardware_flops(self, lengths: Sequence[int], num_predicted: int) -> float:
        """Return `model_flops` plus recomputed forward work, the numerator of HFU."""
        again = self.model.layer_flops(lengths) if self.layers_recomputed else 0.0
        again += self.model.head_per_token * num_predicted if self.logits_recomputed else 0.0
        return self.model_flops(lengths, num_predicted) + again


def attention_matrices(config: Mapping[str, Any]) -> Matrices:
    """Return the matrices of one layer's attention; latent attention as in arXiv:2405.04434."""
    hidden, heads = size_in(config, "hidden_size"), size_in(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rotary, value = size_in(config, "qk_rope_head_dim"), size_in(config, "v_head_dim")
        plain, latent = size_in(config, "qk_nope_head_dim"), size_in(config, "kv_lora_rank")
        query, low = heads * (plain + rotary), int(config.get("q_lora_rank") or 0)
        queries = {"q_a_proj": (hidden, low), "q_b_proj": (low, query)}
        return {
            **(queries if low else {"q_proj": (hidden, query)}),
            "kv_a_proj_with_mqa": (hidden, latent + rotary),
            "kv_b_proj": (latent, heads * (plain + value)),
            "o_proj": (heads * value, hidden),
        }
    head_dim = size_in(config, "head_dim") if config.get("head_dim") else hidden // heads
    key = head_dim * num_kv_heads(config)
    return {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (heads * head_dim, hidden),
    }


def num_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the heads of keys and values."""
    heads = "num_key_value_heads" if config.get("num_key_value_heads") else "num_attention_heads"
    return size_in(config, heads)


def query_width(attention: Matrices) -> int:
    """Return the numbers of one token's queries, over all heads."""
    return attention["q_b_proj" if "q_b_proj" in attention else "q_proj"][1]


def mlp_matrices(config: Mapping[str, Any], width: int) -> Matrices:
    """Return the matrices of a feed-forward layer."""
    hidden = size_in(config, "hidden_size")
    gate = {} if config.get("model_type") in PLAIN_MLP else {"gate_proj": (hidden, width)}
    return {**gate, "up_proj": (hidden, width), "down_proj": (width, hidden)}


def num_weights(matrices: Matrices) -> int:
    """Return the weights of matrices."""
    return sum(prod(sizes) for sizes in matrices.values())


def expert_width(config: Mapping[str, Any]) -> int:
    """Return the width of one expert."""
    return size_in(config, "moe_intermediate_size", "intermediate_size")


def shared_matrices(config: Mapping[str, Any]) -> Matrices:
    """Return the matrices of the experts that every token uses, together, without their gate."""
    num_shared = int(config.get("n_shared_experts") or 0)
    width = num_shared and num_shared * expert_width(config)
    return mlp_matrices(config, width + int(config.get("shared_expert_intermediate_size") or 0))


def num_gate_weights(config: Mapping[str, Any]) -> int:
    """Return the weights of the gate that Qwen2-MoE's shared expert has."""
    return size_in(config, "hidden_size") if config.get("shared_expert_intermediate_size") else 0


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the routed experts of a sparse layer; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def num_sparse_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Return how many layers are mixtures of experts."""
    if not num_experts(config):
        return 0
    kinds = config.get("mlp_layer_types")
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    dense = set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    return sum(i not in dense and i >= first and (i + 1) % step == 0 for i in range(num_layers))


def size_in(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of the named sizes that is set.

    Raises:
        ValueError: none is set, or it is not a positive integer.
    """
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{names[0]}: got {value!r} in config.json; need a positive integer")
    return value
