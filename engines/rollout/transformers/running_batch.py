"""Continuous batching of samples, and logprobs of given tokens, with the rollout model.

`RunningBatch` prefills the samples that join, samples one token per row and removes finished rows.
Promises: between two calls the cache holds the prompt and all sampled tokens but the last of every
sample. A sample leaves in the call that finished it. A bare prompt is computed once for all samples
of its request, also of later joins, until `clear`. Logits of given tokens exist only in tiles,
computed by the head of the training engine: equal hidden states and weights give bitwise equal
logprobs. If the cache has a limit, the shortest samples give way to the longer.
A decode step works on fixed places in memory, so that it can be recorded. Padding rows compute a
token at position 0; the result is not used.
Letters: B rows, M rows at most, P sequences, T tokens, V vocabulary; N requested tokens, K
likeliest tokens.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.transformers.attention import DecodeStep, PrefillStep
from engines.rollout.transformers.decode_graphs import DecodeGraphs
from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.kv_cache import LENGTH_STEP, KVCache
from engines.rollout.transformers.sampling import (
    SamplingColumns,
    sample_tokens,
    stream_starts,
    uniforms,
)
from engines.rollout.transformers.scheduler import Prefix, Sample
from engines.training.model.linear_logprobs import targets_of
from engines.training.outputs import model_outputs, read_positions
from engines.types import ModelOutputs, Readouts, RolloutRequest, TokenBatch
from hardware.base import GraphCapture


@dataclass(frozen=True)
class HeldPrompt:
    """A computed prompt, kept while samples of its request still wait.

    It has the (1, G, L, D) keys and values of each layer, (1, V) logits, and (1,) rotary offset.
    """

    request: RolloutRequest
    layers: list[tuple[Tensor, Tensor]]
    logits_1V: Tensor
    ahead_1: Tensor


class RunningBatch:
    """The samples that are decoded together. The weights may change only after `clear`.

    `new_capture` returns a recorder of decode steps, or None; the weights must stay in place
    between `join` and `free`.
    """

    def __init__(
        self,
        model: InferenceModel,
        max_num_sequences: int,
        max_prefill_tokens: int,
        new_capture: Callable[[], GraphCapture | None] = lambda: None,
    ) -> None:
        self._model = model
        self._max_num_rows = max_num_sequences
        self._max_prefill_tokens = max_prefill_tokens
        self._graphs = DecodeGraphs(new_capture if model.can_be_recorded else lambda: None)
        self._cache = KVCache(
            max_num_sequences, model.context_length, before_replacing=self._graphs.clear
        )
        self.samples: Sequence[Sample] = ()
        """The running samples, in row order."""
        self._held: HeldPrompt | None = None
        # Per row: offset of the rotary position, last token, its position, positions that a step
        # adds, origin of the random stream, the stream, top-k. Unused rows stay at position 0.
        self._ints_7M = self._columns(7, torch.int64)
        # Per row: temperature, top-p, logprob of the last token.
        self._floats_3M = self._columns(3, torch.float64)
        self._token_M, self._logprob_M = self._ints_7M[1], self._floats_3M[2]
        self._longest = 0
        self._any_greedy = self._any_filter = False

    @torch.inference_mode()
    def join(self, prefixes: Sequence[Prefix], next_waiting: Sample | None) -> list[Sample]:
        """Take samples in and sample the next token of each; return those that this token finished.

        A prompt that `next_waiting`, the next sample in line, shares is held for it.
        """
        fresh: list[Prefix] = []
        finished: list[Sample] = []
        for prefix in prefixes:
            if self._held and prefix.shared and prefix.samples[0].request is self._held.request:
                finished += self._continue_held(self._held, prefix.samples)
            else:
                fresh.append(prefix)
        wanted = next_waiting.request if next_waiting and not next_waiting.token_ids else None
        if self._held and self._held.request is not wanted:
            self._held = None
        for chunk in prefill_chunks([len(p.token_ids) for p in fresh], self._max_prefill_tokens):
            finished += self._prefill([fresh[index] for index in chunk], wanted)
        return finished

    @torch.inference_mode()
    def limit_cache(self, num_bytes: int | None) -> None:
        """Set the limit of the cache; the batch has to be empty."""
        self._cache.max_positions = (
            sys.maxsize if num_bytes is None else num_bytes // self._position_bytes
        )

    def lacking_bytes(self, num_tokens: int) -> int | None:
        """Return the size of the cache that one sample needs; None if it is within the limit."""
        if self._cache.fits(1, num_tokens):
            return None
        return self._position_bytes * KVCache.positions(1, num_tokens)

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """See `Fits`; the rows include the running ones."""
        return self._cache.fits(num_rows, max(num_tokens, self._longest))

    def without_room(self) -> list[Sample]:
        """Remove and return the shortest samples that leave the others no room for a token."""
        num_kept = len(self.samples)
        while num_kept > 1 and not self.fits(num_kept, self._longest):
            num_kept -= 1
        if num_kept == len(self.samples):
            return []
        rows = sorted(range(len(self.samples)), key=lambda row: -self.samples[row].num_tokens)
        return self.remove(rows[num_kept:])

    def shrink(self) -> list[Sample]:
        """Free the cache, let it have half of its present size, and return all samples."""
        self._cache.max_positions = self._cache.num_positions // 2
        samples = self.clear()
        self._cache.free()
        return samples

    @torch.inference_mode()
    def decode(self) -> list[Sample]:
        """Sample one more token per row; return the finished samples."""
        num_rows, length = self._reserve(len(self.samples), self._longest)
        if self._model.extend(length):
            self._graphs.clear()
        size = num_rows, length, self._any_greedy, self._any_filter
        self._graphs.run(size, partial(self._step, num_rows, length))
        return self._take_drawn(first_row=0)

    @torch.inference_mode()
    def remove(self, rows: Collection[int]) -> list[Sample]:
        """Take rows out of the batch; return their samples."""
        if not rows:
            return []
        removed = [self.samples[row] for row in sorted(rows)]
        order, movers, holes = fill_holes(len(self.samples), set(rows))
        self._cache.move(movers, holes, self._longest)
        index = torch.tensor(order, dtype=torch.int64, device=self._model.device)
        for columns in (self._ints_7M, self._floats_3M):
            columns[:, : len(order)] = columns.index_select(1, index)
            columns[:, len(order) : len(self.samples)] = 0
        self.samples = [self.samples[row] for row in order]
        self._longest = max((sample.num_tokens for sample in self.samples), default=0)
        return removed

    def clear(self) -> list[Sample]:
        """Take everything out and forget all keys and values; return the samples in row order."""
        self._held = None
        return self.remove(range(len(self.samples)))

    def free(self) -> None:
        """Clear the batch, and free the memory of the cache."""
        self.clear()
        self._cache.free()

    def take_largest_cache_bytes(self) -> int:
        """Return the largest size of the cache since the last call."""
        return self._cache.take_largest_bytes()

    @cached_property
    def _position_bytes(self) -> int:
        """Bytes of one position of one row in all layers, counted with a prompt of one token."""
        cache = KVCache(1, 1)
        cache.reserve(1, 1)
        self._model.prefill([[0]], PrefillStep.build(cache, 0, [1], [1], self._model.device))
        return cache.size_bytes // cache.num_positions

    def _prefill(self, prefixes: Sequence[Prefix], wanted: RolloutRequest | None) -> list[Sample]:
        first_row = len(self.samples)
        samples = [sample for prefix in prefixes for sample in prefix.samples]
        lengths = [len(prefix.token_ids) for prefix in prefixes]
        self._reserve(first_row + len(samples), max(self._longest, *lengths) + 1)
        num_samples = [len(prefix.samples) for prefix in prefixes]
        step = PrefillStep.build(self._cache, first_row, lengths, num_samples, self._model.device)
        logits_PV, ahead_P = self._model.prefill(
            [prefix.token_ids for prefix in prefixes],
            step,
            [prefix.samples[0].request.images for prefix in prefixes],
        )
        for index, prefix in enumerate(prefixes):
            if wanted and prefix.shared and prefix.samples[0].request is wanted:
                row, only = first_row + sum(num_samples[:index]), slice(index, index + 1)
                layers = self._cache.read_row(row, lengths[index])
                self._held = HeldPrompt(
                    wanted, layers, logits_PV[only].clone(), ahead_P[only].clone()
                )
        self._add_rows(samples, ahead_P.index_select(0, step.sequence_B))
        rows = self._rows(first_row, len(self.samples))
        self._draw(logits_PV.index_select(0, step.sequence_B), rows)
        return self._take_drawn(first_row)

    def _continue_held(self, held: HeldPrompt, samples: Sequence[Sample]) -> list[Sample]:
        first_row, num_rows = len(self.samples), len(samples)
        num_tokens = max(self._longest, len(held.request.prompt_ids))
        self._reserve(first_row + num_rows, num_tokens + 1)
        for layer, (keys, values) in enumerate(held.layers):
            self._cache.write_prefixes(
                layer,
                first_row,
                keys.expand(num_rows, -1, -1, -1),
                values.expand(num_rows, -1, -1, -1),
            )
        self._add_rows(samples, held.ahead_1.expand(num_rows))
        rows = self._rows(first_row, len(self.samples))
        self._draw(held.logits_1V.expand(num_rows, -1), rows)
        return self._take_drawn(first_row)

    def _add_rows(self, samples: Sequence[Sample], ahead_B: Tensor) -> None:
        device = self._model.device
        sampling = [sample.request.sampling for sample in samples]
        ints = torch.tensor(
            [
                [0] * len(samples),
                [sample.num_tokens - 1 for sample in samples],
                [1] * len(samples),
                [sample.stream_origin for sample in samples],
                stream_starts([sample.request.seeds[sample.place] for sample in samples]).tolist(),
                [params.top_k for params in sampling],
            ],
            dtype=torch.int64,
            device=device,
        )
        floats = torch.tensor(
            [
                [params.temperature for params in sampling],
                [params.top_p for params in sampling],
                [0] * len(samples),
            ],
            dtype=torch.float64,
            device=device,
        )
        rows = slice(len(self.samples), len(self.samples) + len(samples))
        self._ints_7M[:, rows] = torch.cat([ahead_B[None], ints])
        self._floats_3M[:, rows] = floats
        self.samples = [*self.samples, *samples]
        self._longest = max(sample.num_tokens for sample in self.samples)
        running = [sample.request.sampling for sample in self.samples]
        self._any_greedy = any(params.temperature == 0 for params in running)
        self._any_filter = any(
            params.temperature > 0 and (params.top_k > 0 or params.top_p < 1) for params in running
        )

    def _columns(self, num_values: int, dtype: torch.dtype) -> Tensor:
        shape = num_values, self._max_num_rows
        return torch.zeros(shape, dtype=dtype, device=self._model.device)

    def _padded(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        rows = min(self._graphs.padded(num_rows), self._max_num_rows)
        return rows, self._graphs.padded(num_tokens, LENGTH_STEP)

    def _reserve(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Make room in the cache; return rows and positions, not padded if the limit is below."""
        sizes = self._padded(num_rows, num_tokens)
        if not self._cache.fits(*sizes):
            sizes = num_rows, num_tokens
        self._cache.reserve(*sizes)
        return sizes

    def _step(self, num_rows: int, length: int) -> None:
        """Compute and sample a token in each of the first rows; may be recorded."""
        rows = self._rows(0, num_rows)
        ahead_B, token_B, position_B, *_ = rows
        step = DecodeStep(self._cache, position_B, length)
        logits_BV = self._model.decode(token_B, step, ahead_B if self._model.sees else None)
        self._draw(logits_BV, rows)

    def _rows(self, first_row: int, end_row: int) -> list[Tensor]:
        """Return (B,) views of all columns."""
        rows = slice(first_row, end_row)
        return [*self._ints_7M[:, rows], *self._floats_3M[:, rows]]

    def _draw(self, logits_BV: Tensor, rows: Sequence[Tensor]) -> None:
        """Sample a token for `_rows`, for the next step and for `_take_drawn`."""
        _, token_B, position_B, added_B, origin_B, stream_B, top_k_B, *floats = rows
        temperature_B, top_p_B, logprob_B = floats
        columns = SamplingColumns(
            temperature_B, top_k_B, top_p_B, self._any_greedy, self._any_filter
        )
        uniform_B = uniforms(stream_B, position_B + 1 - origin_B)
        drawn_B, drawn_logprob_B = sample_tokens(logits_BV, uniform_B, columns)
        token_B.copy_(drawn_B)
        logprob_B.copy_(drawn_logprob_B)
        position_B.add_(added_B)

    def _take_drawn(self, first_row: int) -> list[Sample]:
        """Append what was drawn from `first_row` on; return the finished samples."""
        drawn, rows = self.samples[first_row:], slice(first_row, len(self.samples))
        logprobs = self._logprob_M[rows].tolist()
        if not math.isfinite(sum(logprobs)):
            raise RolloutError("the model's logits are not finite; its weights are damaged")
        found = zip(drawn, self._token_M[rows].tolist(), logprobs, strict=True)
        has_ended = [sample.append(token, logprob) for sample, token, logprob in found]
        grown = (sample.num_tokens for sample in drawn)
        # After a decode step every row has one token more.
        self._longest = max(self._longest, *grown) if first_row else self._longest + 1
        return self.remove([row for row, ended in enumerate(has_ended, first_row) if ended])


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences into chunks of padded size (count x longest) <= `max_tokens`; return indices.

    Chunks hold similar lengths; a sequence above the budget is a chunk of its own.
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if chunks and (len(chunks[-1]) + 1) * lengths[index] <= max_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def fill_holes(num_rows: int, leaving: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """Compute how the last rows of a batch move into the places of leaving ones.

    Returns the old row at each new place; the rows that move; the places they move to.
    """
    num_left = num_rows - len(leaving)
    holes = sorted(row for row in leaving if row < num_left)
    movers = [row for row in range(num_left, num_rows) if row not in leaving]
    moved = dict(zip(holes, movers, strict=True))
    return [moved.get(place, place) for place in range(num_left)], movers, holes


def read_prompts(
    model: InferenceModel, requests: Sequence[PromptRequest], max_tokens: int
) -> Iterator[list[PromptLogprobs]]:
    """Yield the prompt logprobs of each forward pass; `prefill_chunks` divides the requests.

    The requests were accepted by `check_prompts`.
    """
    alike: dict[tuple[float, int, int | None], list[PromptRequest]] = {}
    for request in requests:
        key = request.temperature, request.num_top, request.below
        alike.setdefault(key, []).append(request)
    for (temperature, num_top, below), several in alike.items():
        readouts = Readouts(num_top=num_top, top_below=below if num_top else None)
        for chunk in prefill_chunks([len(each.token_ids) for each in several], max_tokens):
            yield _pass(model, [several[at] for at in chunk], temperature, readouts)


@torch.inference_mode()
def _pass(
    model: InferenceModel, requests: Sequence[PromptRequest], temperature: float, readouts: Readouts
) -> list[PromptLogprobs]:
    lengths = [len(request.token_ids) for request in requests]
    asked = [[0.0] * r.first + [1.0] * (len(r.token_ids) - r.first) for r in requests]
    batch = TokenBatch.from_sequences(
        [request.token_ids for request in requests], loss_mask=asked
    ).to(model.device)
    # No cache rows: no sample continues these sequences.
    step = PrefillStep.build(KVCache(0, max(lengths)), 0, lengths, [0] * len(lengths), model.device)
    read_N = read_positions(batch, readouts)
    targets = targets_of(batch, read_N, temperature, readouts)
    found = model.logprob_rows(batch.input_ids_T, step, read_N - 1, targets)
    rows = found.new_zeros(found.shape[0], batch.num_tokens + 1).index_copy(1, read_N, found)
    said = model_outputs(rows, batch, readouts, "language_model")
    spans = zip(requests, pairwise(batch.cu_seqlens.tolist()), strict=True)
    return [_answer(r, said, slice(start + r.first, end)) for r, (start, end) in spans]


def _answer(request: PromptRequest, said: ModelOutputs, places: slice) -> PromptLogprobs:
    """Return the answer, in copies: views would keep the outputs of the whole pass alive."""
    found = PromptLogprobs(request.request_id, said.logprobs_T[places].to("cpu", copy=True))
    if said.topk_ids_TK is None or said.topk_logprobs_TK is None:
        return found
    return replace(
        found,
        topk_ids_NK=said.topk_ids_TK[places].to("cpu", copy=True),
        topk_logprobs_NK=said.topk_logprobs_TK[places].to("cpu", copy=True),
    )
