"""Samples one token per row, with a random stream that belongs to the row.

Promises: a sample uses the numbers of its seed's stream from its draw offset on, one per token, and
no other randomness, so neither the batch nor scheduling nor interruptions change them. Every row
has its own temperature, top-k and top-p. Logprobs are those of the sampled distribution;
temperature 0 takes the largest logit and reports its logprob at temperature 1 without top-k and
top-p, since the logprob of a point mass is always 0.
Does not promise equal logits: another batch shape may round them differently by about 1e-7, which
changes a token only if the uniform number falls into that gap.
Letters: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CHUNK_ELEMENTS = 2**25
"""Logits per chunk of rows: the float64 sums of a chunk take 256 MiB."""


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)
GAMMA = _signed(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling distribution of each row, as tensors.

    Attributes:
        temperature_B: (B,) float64; 0 is greedy.
        top_k_B: (B,) int64; 0 is off.
        top_p_B: (B,) float64; 1 is off.
        any_filter: some row with a positive temperature has top-k or top-p.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    any_greedy: bool
    any_filter: bool

    def select(self, index_B: Tensor) -> "SamplingColumns":
        """Return the given rows; the flags stay as upper bounds."""
        return SamplingColumns(
            self.temperature_B[index_B],
            self.top_k_B[index_B],
            self.top_p_B[index_B],
            self.any_greedy,
            self.any_filter,
        )


def stream_starts(seeds: Sequence[int]) -> Tensor:
    """Return (B,) int64 starts of the random streams of seeds, any integers taken mod 2^64.

    Without mixing, seeds that differ by the generator's increment would share a shifted stream.
    """
    return _mix(torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64))


def uniforms(starts_B: Tensor, index_B: Tensor) -> Tensor:
    """Return number `index` of each stream: (B,) float64 on [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) used as a counter-based generator: output n is
    `mix(start + (n + 1) * gamma)`.
    """
    return _shift_right(_mix(starts_B + (index_B + 1) * GAMMA), 11).to(torch.float64) * 2.0**-53


def sample_tokens(
    logits_BV: Tensor, uniform_B: Tensor, columns: SamplingColumns
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution at `uniform_B`.

    Takes (B, V) logits of any floating dtype. Returns (B,) int64 ids and (B,) float32 logprobs, NaN
    where a row's logits hold NaN.
    """
    num_rows, vocab_size = logits_BV.shape
    rows_per_chunk = max(1, MAX_CHUNK_ELEMENTS // vocab_size)
    if num_rows <= rows_per_chunk:
        return _sample_chunk(logits_BV, uniform_B, columns)
    chunks = [
        _sample_chunk(logits_BV[rows], uniform_B[rows], columns.select(rows))
        for rows in torch.arange(num_rows, device=logits_BV.device).split(rows_per_chunk)
    ]
    return torch.cat([ids for ids, _ in chunks]), torch.cat([logprobs for _, logprobs in chunks])


def filter_logits(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Set to -inf what top-k, then top-p, exclude in (B, V) float32 logits, as transformers does.

    The logits are already divided by the temperature. Top-k keeps every logit that is at least the
    k-th largest (ties stay). Top-p (Holtzman et al., arXiv:1904.09751) keeps the smallest set of
    most probable tokens whose probability after top-k reaches p, at least one.
    """
    vocab_size = logits_BV.shape[1]
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    num_kept_B = torch.where(top_k_B > 0, top_k_B.clamp(max=vocab_size), vocab_size)
    threshold_B1 = sorted_BV.gather(1, num_kept_B[:, None] - 1)
    sorted_BV = sorted_BV.masked_fill(sorted_BV < threshold_B1, -torch.inf)
    # Summed from the least probable end: near 1 the other sum would lose the tail to rounding.
    tail_BV = sorted_BV.softmax(-1).flip(-1).cumsum(-1).flip(-1)
    limit_B1 = torch.where(top_p_B < 1, 1 - top_p_B, -1.0).to(tail_BV.dtype)[:, None]
    removed_BV = (tail_BV <= limit_B1) | sorted_BV.isneginf()
    removed_BV.select(1, 0).fill_(False)
    return logits_BV.masked_fill(
        torch.zeros_like(removed_BV).scatter_(1, order_BV, removed_BV), -torch.inf
    )


def _sample_chunk(
    logits_BV: Tensor, uniform_B: Tensor, columns: SamplingColumns
) -> tuple[Tensor, Tensor]:
    greedy_B = columns.temperature_B == 0
    temperature_B = torch.where(greedy_B, 1.0, columns.temperature_B).float()
    scaled_BV = logits_BV.float() / temperature_B[:, None]
    if columns.any_filter:
        scaled_BV = filter_logits(
            scaled_BV,
            columns.top_k_B.masked_fill(greedy_B, 0),
            columns.top_p_B.masked_fill(greedy_B, 1.0),
        )
    logprobs_BV = scaled_BV.log_softmax(-1)
    # The sums run in float64: in float32 the tail of a large vocabulary would be rounded away.
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # Strictly below the total, so that the draw can never pass the last possible token.
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, below_total_B1)
    ids_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1)
    ids_B = ids_B.clamp(max=logits_BV.shape[1] - 1)
    if columns.any_greedy:
        ids_B = torch.where(greedy_B, logits_BV.argmax(-1), ids_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None]).squeeze(1)


def _mix(x: Tensor) -> Tensor:
    """Output function of SplitMix64; int64 multiplication wraps modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
