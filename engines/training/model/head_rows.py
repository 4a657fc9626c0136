"""Computes the readouts of a language model's head as rows of numbers, tile by tile.

All backends use this order of rows (`engines.training.outputs` names them). Never holds all logits.
Letters: N predicting positions, D model width, V vocabulary, K other tokens of each position.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.training.model.linear_logprobs import linear_token_logprobs
from engines.training.model.linear_tiles import DEFAULT_CHUNK_ELEMENTS
from engines.training.model.linear_tokens import linear_logprobs_of
from engines.training.model.linear_topk import linear_topk_logprobs
from engines.types import Readouts, TokenBatch

_EXACT = 1 << 24
"""Integers up to this are exact in float32: token ids are rows beside the logprobs."""


@dataclass(frozen=True)
class Targets:
    """What the head computes: int64 tokens that hidden states predict, and other readouts."""

    token_ids_N: Tensor
    temperature: float
    readouts: Readouts
    other_ids_NK: Tensor | None = None


def targets_of(
    batch: TokenBatch, read_N: Tensor, temperature: float, readouts: Readouts
) -> Targets:  # fmt: skip
    """Return the targets at places from `read_positions`; of the last token for place T."""
    place_N = read_N.clamp(max=batch.num_tokens - 1)
    name = readouts.logprobs_of
    others_NK = batch.columns[name][place_N] if name is not None else None
    return Targets(batch.input_ids_T[place_N], temperature, readouts, others_NK)


def head_rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    *,
    bias_V: Tensor | None = None,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> Tensor:
    """Return (rows, N) with gradient; other arguments are those of `linear_token_logprobs`.

    Rows: logprobs; entropies; sums of squared probabilities; logprobs of K tokens; their ids.

    Raises:
        ValueError: as in `linear_token_logprobs`; K is out of range; or the vocabulary is too large
            for ids in float32.
    """
    asked, others_NK = targets.readouts, targets.other_ids_NK
    share: dict[str, Any] = {
        "bias_V": bias_V, "temperature": targets.temperature, "chunk_elements": chunk_elements,
        "group": group, "first_token": first_token,
    }  # fmt: skip
    if others_NK is not None and not (asked.entropy or asked.sum_pi_squared):
        # One pass over the tiles for all tokens.
        ids_NK = torch.cat([targets.token_ids_N[:, None], others_NK], dim=1)
        return linear_logprobs_of(hidden_ND, weight_VD, ids_NK, **share).T
    found = linear_token_logprobs(
        hidden_ND, weight_VD, targets.token_ids_N, entropy=asked.entropy,
        sum_pi_squared=asked.sum_pi_squared, **share,
    )  # fmt: skip
    if found.entropy_N is not None and not asked.entropy_gradient:
        found = found._replace(entropy_N=found.entropy_N.detach())
    rows = [found.stacked()]
    if others_NK is not None:
        rows.append(linear_logprobs_of(hidden_ND, weight_VD, others_NK, **share).T)
    if asked.num_top:
        if first_token + weight_VD.shape[0] > _EXACT:
            raise ValueError(f"vocabulary: most likely tokens need one of at most {_EXACT} tokens")
        top = linear_topk_logprobs(
            hidden_ND, weight_VD, asked.num_top, below=asked.top_below, **share
        )
        rows += [top.logprobs_NK.T, top.ids_NK.T.to(top.logprobs_NK.dtype)]
    return torch.cat(rows)
