"""Floating-point operations of a transformers language model, from its `config.json`.

Counts matrix products of dense and mixture-of-experts decoders, and attention scores (causal,
sliding windows; latent attention as in arXiv:2405.04434). One multiply-add is two operations.
Element-wise work and vision or audio towers are not counted; layers without softmax attention are
refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.attention_needs import LAYER_TYPES, layer_windows

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
        hidden_size = size_in(config, "hidden_size")
        num_layers = size_in(config, "num_hidden_layers")
        projections, per_pair = _attention(config, hidden_size)
        sparse = num_sparse_layers(config, num_layers)
        weights = num_layers * projections
        if sparse < num_layers:
            matrices = 2 if config.get("model_type") in PLAIN_MLP else 3
            size = size_in(config, "intermediate_size")
            weights += (num_layers - sparse) * matrices * hidden_size * size
        if sparse:
            weights += sparse * _expert_mlp(config, hidden_size)
        head = size_in(config, "vocab_size") if num_outputs is None else num_outputs
        unknown = sorted({*(config.get("layer_types") or ())} - LAYER_TYPES)
        if unknown:
            raise ValueError(f"layer_types: got {unknown[0]!r}; its operations are not known here")
        return ModelFlops(
            layers_per_token=2.0 * weights,
            head_per_token=2.0 * hidden_size * head,
            attention_per_pair=2.0 * per_pair,
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


def _attention(config: Mapping[str, Any], hidden_size: int) -> tuple[int, int]:
    """Return one layer's projection weights, and multiply-adds per query-key pair."""
    heads = size_in(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rotary = size_in(config, "qk_rope_head_dim")
        plain = size_in(config, "qk_nope_head_dim")
        value, latent = size_in(config, "v_head_dim"), size_in(config, "kv_lora_rank")
        query = heads * (plain + rotary)
        weights = hidden_size * query
        if config.get("q_lora_rank"):
            weights = size_in(config, "q_lora_rank") * (hidden_size + query)
        weights += hidden_size * (latent + rotary) + latent * heads * (plain + value)
        return weights + heads * value * hidden_size, heads * (plain + rotary + value)
    head_dim = size_in(config, "head_dim") if config.get("head_dim") else hidden_size // heads
    kv_heads = (
        size_in(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    )
    return hidden_size * head_dim * 2 * (heads + kv_heads), heads * 2 * head_dim


def _expert_mlp(config: Mapping[str, Any], hidden_size: int) -> int:
    """Return the weights that one token uses: router, chosen experts, shared experts."""
    expert_size = size_in(config, "moe_intermediate_size", "intermediate_size")
    weights = hidden_size * num_experts(config)
    weights += 3 * hidden_size * expert_size * size_in(config, "num_experts_per_tok")
    weights += 3 * hidden_size * expert_size * int(config.get("n_shared_experts") or 0)
    shared_size = int(config.get("shared_expert_intermediate_size") or 0)
    # The shared expert of Qwen2-MoE has a gate of one output.
    return weights + (hidden_size * (3 * shared_size + 1) if shared_size else 0)


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
