"""Pack trajectories into the batch that ranks train on.

Promises: the loss covers the tokens of trained segments, a shared prefix only once. A token costs 9
bytes, as `viewed` trajectories share the memory of their batch.
Letters: B trajectories, T tokens of all of them, S segments including prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.images import ImagePatches
from engines.requests import Float32Array, Segment
from engines.trajectory import Prompt, Trajectory
from engines.types import TokenBatch

Part = TypeVar("Part")

See = Callable[[Sequence[Sequence[bytes]]], ImagePatches | None]
"""Makes the patches of the images of sequences, given as file contents."""


def pack(trajectories: Sequence[Trajectory], see: See | None = None) -> TokenBatch:
    """Concatenate B trajectories, each after its prompt; without `see` there are no images.

    The batch is narrow (`TokenBatch.widened`): int32 ids, bool `loss_mask` (trained tokens).
    `rollout_logprobs` and segment columns are float32, 0 on prompts and where a segment has none.
    """
    ids = _laid_out(trajectories, lambda prompt: prompt.token_ids_P, lambda part: part.token_ids_N)
    trained = _laid_out(trajectories, lambda _: False, lambda part: part.trained)
    ends = np.cumsum([0, *map(len, ids)])
    ends_B = ends[np.cumsum([0, *(1 + len(each.segments) for each in trajectories)])]
    trained_T = np.repeat(np.array(trained, bool), np.diff(ends))
    for each, start in zip(trajectories, ends_B.tolist(), strict=False):
        behind = start + len(each.prompt.token_ids_P)
        trained_T[behind : behind + each.branch_point] = False
    named = sorted({n for each in trajectories for part in each.segments for n in part.columns})
    longest = max(map(len, ids), default=0)
    column = partial(_column, trajectories, longest)
    return TokenBatch(
        _joined(ids),
        torch.from_numpy(ends_B.astype(np.int32)),
        {
            "loss_mask": torch.from_numpy(trained_T),
            "rollout_logprobs": column(lambda part: part.logprobs_N),
            **{name: column(partial(_named, name)) for name in named},
        },
        see([each.images for each in trajectories]) if see else None,
    )


def viewed(trajectories: Sequence[Trajectory], batch: TokenBatch) -> list[Trajectory]:
    """Return B trajectories whose ids and logprobs are views of their packed batch."""
    ids_T = batch.input_ids_T.numpy()
    logprobs_T = batch.columns["rollout_logprobs"].numpy()
    found: list[Trajectory] = []
    for each, start in zip(trajectories, batch.cu_seqlens.tolist(), strict=False):
        end, segments = start + len(each.prompt.token_ids_P), list[Segment]()
        for segment in each.segments:
            own = slice(end, end + segment.num_tokens)
            end = own.stop
            arrays = {"token_ids_N": ids_T[own], "logprobs_N": logprobs_T[own]}
            segments.append(replace(segment, **arrays))
        found.append(replace(each, segments=tuple(segments)))
    return found


def segment_rewards_T(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
    """Return (T,) float64: each segment's reward on the last trained token up to its end, else 0.

    A reward before the first trained token is dropped, as no action of the policy led to it.
    """
    rewards_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if all(part.reward is None for each in trajectories for part in each.segments):
        return rewards_T
    place_T = torch.arange(batch.num_tokens)
    last_T = torch.where(batch.columns["loss_mask"] > 0, place_T, -1).cummax(0).values
    for each, start in zip(trajectories, batch.cu_seqlens.tolist(), strict=False):
        end = start + len(each.prompt.token_ids_P)
        for segment in each.segments:
            end += segment.num_tokens
            if segment.reward is not None and end and int(last_T[end - 1]) >= start:
                rewards_T[int(last_T[end - 1])] += segment.reward
    return rewards_T


def _laid_out(
    trajectories: Sequence[Trajectory],
    of_prompt: Callable[[Prompt], Part],
    of_segment: Callable[[Segment], Part],
) -> list[Part]:
    """Return a value of each prompt and of its segments, in token order."""
    return [
        part
        for each in trajectories
        for part in (of_prompt(each.prompt), *map(of_segment, each.segments))
    ]


def _column(
    trajectories: Sequence[Trajectory],
    longest: int,
    values: Callable[[Segment], Float32Array | None],
) -> Tensor:
    """Return values of the tokens of all segments; 0 on prompts and in segments without values."""
    found = (values(part) for each in trajectories for part in each.segments)
    width = next((array.shape[1:] for array in found if array is not None), ())
    zeros = np.zeros((longest, *width), np.float32)

    def of_segment(segment: Segment) -> Float32Array:
        array = values(segment)
        return zeros[: segment.num_tokens] if array is None else array

    return _joined(
        _laid_out(trajectories, lambda prompt: zeros[: len(prompt.token_ids_P)], of_segment)
    )


def _named(name: str, segment: Segment) -> Float32Array | None:
    return segment.columns.get(name)


def _joined(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate the arrays in the dtype of the first; (0,) float32 if there are none."""
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0)
