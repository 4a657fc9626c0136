"""The attention function that fills and reads the key-value cache of a running batch.

Prefill: P sequences are packed into one row of T tokens; each attends only to itself, and its keys
and values are copied to the cache rows of its samples. Decode: B rows of one token, each attending
to its cache row. A sliding window of W tokens covers the last W positions, the current one
included. Transformers passes on the keywords `rollout_step` and `sliding_window`.
Promises: a model that drops one of the keywords is refused.
Letters: B cache rows, P sequences, T tokens, H query heads, G KV heads, L positions, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engines.errors import RolloutError
from engines.rollout.transformers.kv_cache import KVCache

ATTENTION_NAME = "rollout_kv_cache"
"""Name under which `attend` is registered in transformers."""
_REFUSED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class PrefillStep:
    """One prefill of P packed sequences, which start new cache rows.

    Attributes:
        first_row: cache row of the first sample.
        sequence_B: (B,) int64, the sequence that each new cache row starts from.
        padded_PL: (P * L,) int64, the token at each place of the padded (P, L) form; padding
            repeats an arbitrary token, which the causal mask hides.
        packed_T: (T,) int64, the place of each token in the padded form.
        last_P: (P,) int64, index of the last token of each sequence.
        attended: layers that have called `attend` in this step.
    """

    cache: KVCache
    first_row: int
    sequence_B: Tensor
    padded_PL: Tensor
    packed_T: Tensor
    position_T: Tensor
    last_P: Tensor
    attended: set[int] = field(default_factory=set)

    @staticmethod
    def build(
        cache: KVCache,
        first_row: int,
        lengths: Sequence[int],
        num_samples: Sequence[int],
        device: torch.device,
    ) -> "PrefillStep":
        """Build the step for sequences of these lengths, each copied to `num_samples` rows."""
        length_P = torch.tensor(lengths)
        end_P = length_P.cumsum(0)
        place_L = torch.arange(max(lengths))
        real_PL = place_L < length_P[:, None]
        padded_PL = torch.where(real_PL, (end_P - length_P)[:, None] + place_L, 0)
        return PrefillStep(
            cache=cache,
            first_row=first_row,
            sequence_B=torch.arange(len(lengths))
            .repeat_interleave(torch.tensor(num_samples))
            .to(device),
            padded_PL=padded_PL.flatten().to(device),
            packed_T=real_PL.flatten().nonzero().squeeze(1).to(device),
            position_T=place_L.expand_as(real_PL)[real_PL].to(device),
            last_P=(end_P - 1).to(device),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Map (1, H, T, D) queries to (1, T, H, D) outputs; fills the cache rows."""
        query, key, value = (self._pad(x) for x in (query, key, value))
        self.cache.write_prefixes(
            layer,
            self.first_row,
            key.index_select(0, self.sequence_B),
            value.index_select(0, self.sequence_B),
        )
        longest = query.shape[2]
        seen_LL = None
        if window is not None and window < longest:
            everything_LL = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
            seen_LL = everything_LL.tril().triu(1 - window)
        out_PHLD = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen_LL,
            is_causal=seen_LL is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_PHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.packed_T)[None]

    def _pad(self, x_1HTD: Tensor) -> Tensor:
        """Map (1, H, T, D) to (P, H, L, D)."""
        x_HPLD = x_1HTD[0].index_select(1, self.padded_PL).unflatten(1, (self.last_P.numel(), -1))
        return x_HPLD.transpose(0, 1)


@dataclass(frozen=True)
class DecodeStep:
    """One token per cache row, at `position_B` (B,) int64; no row is longer than `length`."""

    cache: KVCache
    position_B: Tensor
    length: int
    attended: set[int] = field(default_factory=set)
    _slots: dict[int, Tensor] = field(default_factory=dict)
    _biases: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Map (B, H, 1, D) queries to (B, 1, H, D) outputs.

        The query heads of one key-value head are the rows of one matrix product, so keys and values
        are read once and not repeated per query head.
        """
        num_rows, num_heads, _, width = query.shape
        num_kv_heads = key.shape[1]
        if num_kv_heads not in self._slots:
            self._slots[num_kv_heads] = self.cache.slots(self.position_B, num_kv_heads)
        keys, values = self.cache.append(layer, key, value, self._slots[num_kv_heads], self.length)
        if window not in self._biases:
            position_B1 = self.position_B[:, None]
            place_L = torch.arange(self.length, device=position_B1.device)
            hidden_BL = place_L > position_B1
            if window is not None:
                hidden_BL |= place_L <= position_B1 - window
            # (B, 1, 1, L) float32: 0 where the row's token attends, else -inf.
            bias_BL = torch.zeros(hidden_BL.shape, device=position_B1.device)
            self._biases[window] = bias_BL.masked_fill_(hidden_BL, -torch.inf)[:, None, None]
        grouped = (query * scaling).reshape(num_rows, num_kv_heads, -1, width)
        scores = torch.matmul(grouped, keys.transpose(2, 3)) + self._biases[window]
        weights = scores.softmax(-1).to(values.dtype)
        return torch.matmul(weights, values).reshape(num_rows, 1, num_heads, -1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rollout_step: PrefillStep | DecodeStep | None = None,
    sliding_window: int | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface with the step's `attend`.

    Shapes: query (batch, H, tokens, D), key and value (batch, G, tokens, D), output (batch, tokens,
    H, D). The mask must be None: the step defines it. The module's `layer_idx` is the cache layer.
    A window includes the token itself; None: no limit.

    Raises:
        RolloutError: the model drops `rollout_step` or its window, needs unsupported attention, or
            has a layer that attends twice and would overwrite its own keys.
    """
    if rollout_step is None:
        raise RolloutError(f"{type(module).__name__} does not pass rollout_step to its attention")
    lacking = [name for name in _REFUSED if extra.get(name) is not None]
    if attention_mask is not None:
        lacking.append("a mask")
    if not getattr(module, "is_causal", True):
        lacking.append("later tokens")
    if lacking:
        raise RolloutError(
            f"{type(module).__name__} needs attention with {lacking[0]}: not supported"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise RolloutError(f"{type(module).__name__} has no layer_idx")
    if sliding_window != declared_window(module, layer):
        raise RolloutError(f"{type(module).__name__} does not pass its window to its attention")
    if layer in rollout_step.attended:
        raise RolloutError(f"{type(module).__name__} attends twice in one layer: not supported")
    rollout_step.attended.add(layer)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    return rollout_step.attend(layer, query, key, value, factor, sliding_window), None


def declared_window(module: nn.Module, layer: int) -> int | None:
    """Return the sliding window that the model's configuration gives a layer."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or layer_types[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


AttentionInterface.register(ATTENTION_NAME, attend)
