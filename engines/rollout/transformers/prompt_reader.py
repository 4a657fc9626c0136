"""Logprobs of given tokens, computed in passes with a token budget.

Promises: logits exist only in tiles, computed by the head of the training engine: equal hidden
states and weights give bitwise equal logprobs.
Letters: T tokens of several sequences, N of them asked about, K likeliest tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.transformers.attention import PrefillStep
from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.kv_cache import KVCache
from engines.rollout.transformers.scheduler import prefill_chunks
from engines.training.model.head_rows import targets_of
from engines.training.outputs import model_outputs, read_positions
from engines.types import ModelOutputs, Readouts, TokenBatch


class PromptReader:
    """Computes prompt logprobs with at most `max_tokens` padded tokens per forward pass."""

    def __init__(self, model: InferenceModel, max_tokens: int) -> None:
        self._model, self._max_tokens = model, max_tokens

    def read(self, requests: Sequence[PromptRequest]) -> Iterator[list[PromptLogprobs]]:
        """Yield the answers of each forward pass, to requests that `check_prompts` accepted."""
        alike: dict[tuple[float, int, int | None], list[PromptRequest]] = {}
        for request in requests:
            asked = request.temperature, request.num_top, request.below
            alike.setdefault(asked, []).append(request)
        for (temperature, num_top, below), several in alike.items():
            readouts = Readouts(num_top=num_top, top_below=below if num_top else None)
            lengths = [len(request.token_ids) for request in several]
            for chunk in prefill_chunks(lengths, self._max_tokens):
                yield self._pass([several[at] for at in chunk], temperature, readouts)

    @torch.inference_mode()
    def _pass(
        self, requests: Sequence[PromptRequest], temperature: float, readouts: Readouts
    ) -> list[PromptLogprobs]:
        model = self._model
        lengths = [len(request.token_ids) for request in requests]
        asked = [[0.0] * r.first + [1.0] * (len(r.token_ids) - r.first) for r in requests]
        batch = TokenBatch.from_sequences([r.token_ids for r in requests], loss_mask=asked)
        batch = batch.to(model.device)
        # No cache rows: no sample continues these sequences.
        cache = KVCache(model.num_layers, 0, max(lengths))
        step = PrefillStep.build(cache, 0, lengths, [0] * len(lengths), model.device)
        read_N = read_positions(batch, readouts)
        targets = targets_of(batch, read_N, temperature, readouts)
        found = model.logprob_rows(batch.input_ids_T, step, read_N - 1, targets)
        rows = found.new_zeros(found.shape[0], batch.num_tokens + 1).index_copy(1, read_N, found)
        said = model_outputs(rows, batch, readouts, "language_model")
        ends = batch.cu_seqlens.tolist()
        spans = zip(requests, ends, ends[1:], strict=False)
        return [_answer(r, said, slice(start + r.first, end)) for r, start, end in spans]


def _answer(request: PromptRequest, said: ModelOutputs, places: slice) -> PromptLogprobs:
    """Return copies of some places; views would keep the outputs of the whole pass alive."""

    def copied(column: Tensor) -> Tensor:
        return column[places].to("cpu", copy=True)

    ids_TK, logprobs_TK = said.topk_ids_TK, said.topk_logprobs_TK
    return PromptLogprobs(
        request.request_id,
        copied(said.logprobs_T),
        None if ids_TK is None else copied(ids_TK),
        None if logprobs_TK is None else copied(logprobs_TK),
    )
