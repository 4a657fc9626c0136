"""Pack trajectories into the batch that ranks train on.

Promises: the loss covers the tokens of trained segments, a shared prefix only once. A token costs 9
bytes if its trajectory is `viewed`, that is, shares the memory of its batch.
Letters: B trajectories, T tokens of all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engines.images import ImagePatches
from engines.requests import Float32Array, Int32Array, Segment
from engines.trajectory import Trajectory
from engines.types import TokenBatch

See = Callable[[Sequence[Sequence[bytes]]], ImagePatches | None]
"""Makes image patches from each sequence's image files, as bytes; None without images."""


def pack(trajectories: Sequence[Trajectory], see: See | None = None) -> TokenBatch:
    """Concatenate B trajectories, each after its prompt; `see`, if given, makes image patches.

    The batch is narrow (`TokenBatch.widened`): int32 ids, bool `loss_mask` (trained tokens).
    `rollout_logprobs` and segment columns are float32, 0 on prompts and where a segment has none.
    """
    rows = list(_laid_out(trajectories))
    segments = [placed for _, _, own in rows for placed in own]
    ids: list[Int32Array] = []
    for each, _, own in rows:
        ids += [each.prompt.token_ids_P, *(segment.token_ids_N for segment, _ in own)]
    num_tokens = sum(map(len, ids))
    trained_T = np.zeros(num_tokens, bool)
    for each, start, own in rows:
        for segment, span in own:
            trained_T[span] = segment.trained
        behind = start + len(each.prompt.token_ids_P)
        trained_T[behind : behind + each.branch_point] = False

    def column(arrays: Sequence[Float32Array | None]) -> Tensor:
        width = next((array.shape[1:] for array in arrays if array is not None), ())
        values_T = np.zeros((num_tokens, *width), np.float32)
        for array, (_, span) in zip(arrays, segments, strict=True):
            if array is not None and array.shape[1:] != width:
                raise ValueError(f"a segment column of {array.shape}; need {width} for each token")
            if array is not None:
                values_T[span] = array
        return torch.from_numpy(values_T)

    named = sorted({name for segment, _ in segments for name in segment.columns})
    return TokenBatch(
        torch.from_numpy(np.concatenate(ids)) if ids else torch.zeros(0),
        torch.tensor([*(start for _, start, _ in rows), num_tokens], dtype=torch.int32),
        {
            "loss_mask": torch.from_numpy(trained_T),
            "rollout_logprobs": column([segment.logprobs_N for segment, _ in segments]),
            **{n: column([segment.columns.get(n) for segment, _ in segments]) for n in named},
        },
        see([each.images for each in trajectories]) if see else None,
    )


def _laid_out(
    trajectories: Sequence[Trajectory],
) -> Iterator[tuple[Trajectory, int, list[tuple[Segment, slice]]]]:
    """Yield each trajectory, the index of its first token, and its segments with their slices."""
    start = 0
    for each in trajectories:
        end, own = start + len(each.prompt.token_ids_P), list[tuple[Segment, slice]]()
        for segment in each.segments:
            own.append((segment, slice(end, end + segment.num_tokens)))
            end += segment.num_tokens
        yield each, start, own
        start = end


def viewed(trajectories: Sequence[Trajectory], batch: TokenBatch) -> list[Trajectory]:
    """Return B trajectories whose ids and logprobs are views of their packed batch."""
    ids_T = batch.input_ids_T.numpy()
    logprobs_T = batch.columns["rollout_logprobs"].numpy()
    found: list[Trajectory] = []
    for each, _, own in _laid_out(trajectories):
        views = (
            replace(segment, token_ids_N=ids_T[span], logprobs_N=logprobs_T[span])
            for segment, span in own
        )
        found.append(replace(each, segments=tuple(views)))
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
    for _, start, own in _laid_out(trajectories):
        for segment, span in own:
            last = int(last_T[span.stop - 1]) if span.stop else -1
            if segment.reward is not None and last >= start:
                rewards_T[last] += segment.reward
    return rewards_T
