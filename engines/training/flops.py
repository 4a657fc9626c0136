"""Floating-point operations of a transformers language model, from its `config.json` alone.

Counts the matrix products of dense and mixture-of-experts decoders: attention projections (grouped
queries, or latent attention as in arXiv:2405.04434), attention scores (causal, sliding windows),
gated and plain feed-forward layers, routers, shared experts, and the output head, which costs the
same whether its weights are tied to the embedding or not. One multiply-add is two operations.
Not counted: norms, activations, rotary embeddings, softmax and other element-wise work, vision and
audio towers (a model with a `text_config` is counted as that). Refused: layers without softmax
attention. Frozen weights are counted as trained unless an adapter is.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.attention_needs import LAYER_TYPES, layer_windows
from engines.training.spec import EngineSpec

_PLAIN_MLP = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose feed-forward layer has two matrices instead of three."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a model's forward pass, as a function of sequence lengths.

    Attributes:
        layers_per_token: of one token in all layers, attention scores aside.
        head_per_token: of one predicted token in the output head.
        attention_per_pair: of one query-key pair in one layer: its score, and its share of the
            output.
        windows: (tokens a query sees at most, or None for all; number of such layers).
    """

    layers_per_token: float
    head_per_token: float
    attention_per_pair: float
    windows: tuple[tuple[int | None, int], ...]

    @staticmethod
    def from_config(config: Mapping[str, Any], *, num_outputs: int | None = None) -> "ModelFlops":
        """Read a transformers configuration.

        Args:
            config: the content of `config.json`.
            num_outputs: width of the output head; None is the vocabulary, 1 a value model.

        Returns:
            The operations of that model.

        Raises:
            ValueError: a size is absent or not a positive integer, or a layer type is unknown.
        """
        config = config.get("text_config") or config
        hidden_size = _size(config, "hidden_size")
        num_layers = _size(config, "num_hidden_layers")
        projections, per_pair = _attention(config, hidden_size)
        sparse = _num_sparse_layers(config, num_layers)
        weights = num_layers * projections
        weights += (
            (num_layers - sparse) * _dense_mlp(config, hidden_size) if sparse < num_layers else 0
        )
        weights += sparse * _expert_mlp(config, hidden_size) if sparse else 0
        head = _size(config, "vocab_size") if num_outputs is None else num_outputs
        windows = Counter(_windows(config, num_layers))
        return ModelFlops(
            layers_per_token=2.0 * weights,
            head_per_token=2.0 * hidden_size * head,
            attention_per_pair=2.0 * per_pair,
            windows=tuple(windows.items()),
        )

    def sequence_costs(self, lengths: Sequence[int]) -> list[float]:
        """Forward operations of each sequence, every token predicted; what balancing is about."""
        per_token = self.layers_per_token + self.head_per_token
        return [length * per_token + self._attention(length) for length in lengths]

    def forward_flops(self, lengths: Sequence[int], num_predicted: int | None = None) -> float:
        """Operations of a forward pass over packed sequences.

        Args:
            lengths: tokens of each sequence.
            num_predicted: tokens that the output head computes; None is all of them.

        Returns:
            Operations.
        """
        head = self.head_flops(sum(lengths) if num_predicted is None else num_predicted)
        return self.layer_flops(lengths) + head

    def layer_flops(self, lengths: Sequence[int]) -> float:
        """Forward operations of everything but the output head."""
        return sum(n * self.layers_per_token + self._attention(n) for n in lengths)

    def head_flops(self, num_predicted: int) -> float:
        """Forward operations of the output head for some tokens."""
        return self.head_per_token * num_predicted

    def _attention(self, length: int) -> float:
        """Scores of one sequence in all layers; a causal mask halves the square."""
        pairs = 0.0
        for window, num_layers in self.windows:
            seen = length if window is None else min(window, length)
            pairs += num_layers * (seen * length - seen * seen / 2)
        return self.attention_per_pair * pairs


@dataclass(frozen=True)
class TrainingFlops:
    """Operations of forward and backward passes, as an engine runs them.

    Attributes:
        model: of the forward pass.
        weights_frozen: an adapter is trained and no weight: backward passes have no gradients of
            weights. The adapter's own products, a few percent at usual ranks, are not counted.
        layers_recomputed: with activation checkpointing of every layer.
        logits_recomputed: with `linear_token_logprobs`.
    """

    model: ModelFlops
    weights_frozen: bool = False
    layers_recomputed: bool = False
    logits_recomputed: bool = False

    def model_flops(self, lengths: Sequence[int], num_predicted: int) -> float:
        """What the step needs, the numerator of MFU (arXiv:2204.02311).

        That is three forward passes; without gradients of weights, two and one of attention
        scores, which are products of activations.

        Args:
            lengths: tokens of each sequence.
            num_predicted: tokens that the output head computes.

        Returns:
            Operations.
        """
        whole = 3.0 * self.model.forward_flops(lengths, num_predicted)
        if not self.weights_frozen:
            return whole
        gradients = self.model.layers_per_token * sum(lengths)
        return whole - gradients - self.model.head_flops(num_predicted)

    def hardware_flops(self, lengths: Sequence[int], num_predicted: int) -> float:
        """`model_flops` and the forward work that is done twice (HFU); arguments alike."""
        again = self.model.layer_flops(lengths) if self.layers_recomputed else 0.0
        again += self.model.head_flops(num_predicted) if self.logits_recomputed else 0.0
        return self.model_flops(lengths, num_predicted) + again


def flops_of(spec: EngineSpec) -> TrainingFlops | None:
    """Operations of the training that an engine is made for.

    Args:
        spec: of the engine; `config.json` of its model is read.

    Returns:
        None where the architecture cannot be counted.
    """
    values = spec.model_type == "value_model"
    try:
        config = json.loads((spec.hf_dir / "config.json").read_text(encoding="utf-8"))
        model = ModelFlops.from_config(config, num_outputs=1 if values else None)
    except (FileNotFoundError, ValueError):
        return None
    return TrainingFlops(
        model,
        weights_frozen=spec.training.lora is not None,
        layers_recomputed=spec.training.gradient_checkpointing,
        logits_recomputed=not values,
    )


def _attention(config: Mapping[str, Any], hidden_size: int) -> tuple[int, int]:
    """Weights of one layer's projections, and multiply-adds of one query-key pair."""
    heads = _size(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rotary = _size(config, "qk_rope_head_dim")
        plain = _size(config, "qk_nope_head_dim")
        value, latent = _size(config, "v_head_dim"), _size(config, "kv_lora_rank")
        query = heads * (plain + rotary)
        if config.get("q_lora_rank"):
            rank = _size(config, "q_lora_rank")
            weights = rank * (hidden_size + query)
        else:
            weights = hidden_size * query
        weights += hidden_size * (latent + rotary) + latent * heads * (plain + value)
        return weights + heads * value * hidden_size, heads * (plain + rotary + value)
    head_dim = _size(config, "head_dim") if config.get("head_dim") else hidden_size // heads
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    return hidden_size * head_dim * 2 * (heads + kv_heads), heads * 2 * head_dim


def _dense_mlp(config: Mapping[str, Any], hidden_size: int) -> int:
    matrices = 2 if config.get("model_type") in _PLAIN_MLP else 3
    return matrices * hidden_size * _size(config, "intermediate_size")


def _expert_mlp(config: Mapping[str, Any], hidden_size: int) -> int:
    """Weights that one token meets in a mixture: router, chosen experts, shared experts."""
    expert_size = _size(config, "moe_intermediate_size", "intermediate_size")
    weights = hidden_size * _num_experts(config)
    weights += 3 * hidden_size * expert_size * _size(config, "num_experts_per_tok")
    weights += 3 * hidden_size * expert_size * int(config.get("n_shared_experts") or 0)
    shared_size = int(config.get("shared_expert_intermediate_size") or 0)
    # The shared expert of Qwen2-MoE has a gate of one output.
    return weights + (hidden_size * (3 * shared_size + 1) if shared_size else 0)


def _num_experts(config: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _num_sparse_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers whose feed-forward part is a mixture of experts."""
    if not _num_experts(config):
        return 0
    kinds = config.get("mlp_layer_types")
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    dense = set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    return sum(i not in dense and i >= first and (i + 1) % step == 0 for i in range(num_layers))


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Of each layer, how many tokens a query sees; None is all before it."""
    kinds = config.get("layer_types")
    unknown = sorted(set(kinds or ()) - LAYER_TYPES)
    if unknown:
        raise ValueError(f"layer_types: got {unknown[0]!r}; its operations are not known here")
    return layer_windows(config, num_layers)


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of the named sizes that is there."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{names[0]}: got {value!r} in config.json; need a positive integer")
    return value
