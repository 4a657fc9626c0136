"""Compute the columns that distillation reads from a teacher; 0 on tokens that are not taught.

Promises: the same columns wherever the teacher runs, up to rounding, which may reorder tokens of
nearly equal probability.
Letters: T tokens of the step, K most likely tokens of the teacher, N tokens of one answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.distillation import SAMPLED_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS
from engines.config.algorithm import TOPK, DistillationConfig
from engines.controller.model_worker import ModelWorker
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.training.spec import TEACHER
from engines.types import Readouts, TokenBatch


@dataclass(frozen=True)
class RankTeacher:
    """Computes the columns with the role `teacher` of the training ranks.

    `vocab_size` is the policy's. A teacher's ids from there on are part of its distribution, but
    are not taught.
    """

    config: DistillationConfig
    run: Callable[..., Any]
    vocab_size: int

    def columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return columns by name, computed where `loss_mask` is not 0.

        For `topk` (T, K) int64 ids and float32 logprobs, else (T,) float32 of the sampled tokens.
        """
        if self.config.loss != TOPK:
            return {SAMPLED_LOGPROBS: self.run(ModelWorker.infer_logprobs, batch, TEACHER)}
        found = self.run(
            ModelWorker.infer,
            batch,
            Readouts(num_top=self.config.num_top, top_below=self.vocab_size),
            TEACHER,
        )
        return {TOPK_IDS: found.topk_ids_TK, TOPK_LOGPROBS: found.topk_logprobs_TK}


@dataclass(frozen=True)
class ServedTeacher:
    """Computes the columns with engines that serve the teacher; `vocab_size` is the policy's."""

    config: DistillationConfig
    ask: Callable[[Sequence[PromptRequest]], list[PromptLogprobs]]
    temperature: float
    vocab_size: int

    def columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """See `RankTeacher.columns`.

        Raises:
            RolloutError: its engines cannot answer.
            DeadlineError: the answers did not arrive in time.
        """
        num_top = self.config.num_top if self.config.loss == TOPK else 0
        mask_T, starts = batch.columns["loss_mask"] != 0, batch.cu_seqlens.tolist()
        requests: list[PromptRequest] = []
        places: list[slice] = []
        for start, end in zip(starts, starts[1:], strict=False):
            taught = mask_T[start:end].nonzero().flatten()
            if not len(taught):
                continue
            # Request logprobs only from the first to the last taught token.
            first, last = int(taught[0]), int(taught[-1])
            ids = tuple(batch.input_ids_T[start : start + last + 1].tolist())
            requests.append(
                PromptRequest(
                    f"teacher/{len(requests)}",
                    ids,
                    first,
                    self.temperature,
                    num_top,
                    self.vocab_size,
                )
            )
            places.append(slice(start + first, start + last + 1))
        return self._laid_out(batch, mask_T, places, self.ask(requests))

    def _laid_out(
        self,
        batch: TokenBatch,
        mask_T: Tensor,
        places: Sequence[slice],
        answers: Sequence[PromptLogprobs],
    ) -> dict[str, Tensor]:
        """Return the columns, with each answer at its place in the step."""
        if self.config.loss != TOPK:
            logprobs_T = torch.zeros(batch.num_tokens)
            for place, answer in zip(places, answers, strict=True):
                logprobs_T[place] = answer.logprobs_N
            return {SAMPLED_LOGPROBS: logprobs_T.masked_fill_(~mask_T, 0.0)}
        shape = batch.num_tokens, self.config.num_top
        ids_TK, logprobs_TK = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for place, answer in zip(places, answers, strict=True):
            if answer.topk_ids_NK is None or answer.topk_logprobs_NK is None:
                raise ValueError(f"{answer.request_id}: the engine returned no top-k logprobs")
            ids_TK[place], logprobs_TK[place] = answer.topk_ids_NK, answer.topk_logprobs_NK
        untaught_T1 = ~mask_T[:, None]
        return {
            TOPK_IDS: ids_TK.masked_fill_(untaught_T1, 0),
            TOPK_LOGPROBS: logprobs_TK.masked_fill_(untaught_T1, 0.0),
        }


Teacher = RankTeacher | ServedTeacher
"""A teacher model on the training ranks or on its own engines."""
