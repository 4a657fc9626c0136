"""What a language model's head is asked for, and the rows that answer it, chunk by chunk.

Promises: one order of rows for every backend (`engines.training.outputs` names them); never all
logits. The tokens of a teacher and its most likely ones come of the same tiles: where hidden
states, weights and predicted positions are equal, so are the numbers, to the bit.
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
"""Whole numbers below it are float32 numbers too: token ids travel with the log-probabilities."""


@dataclass(frozen=True)
class Targets:
    """What the head is asked for.

    Attributes:
        token_ids_N: (N,) int64, the token that each row of hidden states predicts.
        temperature: of the distribution.
        readouts: what else.
        other_ids_NK: (N, K) int64, other tokens whose log-probabilities are asked for.
    """

    token_ids_N: Tensor
    temperature: float
    readouts: Readouts
    other_ids_NK: Tensor | None = None


def targets_of(
    batch: TokenBatch, read_N: Tensor, temperature: float, readouts: Readouts
) -> Targets:  # fmt: skip
    """What the head is asked for at some places of a batch.

    Args:
        batch: on the device.
        read_N: see `read_positions`.
        temperature: of the distribution.
        readouts: what else.

    Returns:
        The targets; of a place behind the last token those of the last token.
    """
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
    """The rows of some positions, with gradient; see `linear_token_logprobs` for a group.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), or this rank's rows of it.
        targets: what is asked for.
        bias_V: (V,), or this rank's part.
        chunk_elements: most logits of a tile.
        group: ranks that hold the rows of the weights; None: this rank holds all.
        first_token: the token that this rank's first row stands for.

    Returns:
        (rows, N) float32, float64 where the inputs are: log-probabilities; entropies; sums of
        squared probabilities; log-probabilities of K tokens; ids of the K most likely ones.

    Raises:
        ValueError: as `linear_token_logprobs`; or K is not in the vocabulary's range, or the
            vocabulary too large for ids in float32.
    """
    asked, others_NK = targets.readouts, targets.other_ids_NK
    share: dict[str, Any] = {
        "bias_V": bias_V, "temperature": targets.temperature, "chunk_elements": chunk_elements,
        "group": group, "first_token": first_token,
    }  # fmt: skip
    if others_NK is not None and not (asked.entropy or asked.sum_pi_squared):
        # The tiles are computed once for all of them.
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
