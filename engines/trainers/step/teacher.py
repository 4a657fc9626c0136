"""What a teacher says of a step's samples, as the columns that distillation reads.

Promises: wherever the teacher is, the same columns, up to rounding, which may order tokens that are
all but equally likely; 0 where nothing is taught.
Letters: T tokens of the step, K likeliest tokens of the teacher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.algorithms.distillation.losses import SAMPLED_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS
from engines.config.distillation import TOPK, DistillationConfig
from engines.controller.model_worker import ModelWorker
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.training.roles import TEACHER
from engines.types import Readouts, TokenBatch


class Teacher(Protocol):
    """What is asked, wherever the model is."""

    def columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Ask.

        Args:
            batch: of the step; the teacher is asked about tokens whose `loss_mask` is not 0.

        Returns:
            Of `topk` (T, K) int64 ids and float32 log-probabilities, else (T,) float32 of the
            sampled tokens; see `engines.algorithms.distillation.losses`.

        Raises:
            RolloutError: its engines cannot answer.
            DeadlineError: the answers were not there in time.
        """
        ...


@dataclass(frozen=True)
class RankTeacher:
    """The role `teacher` of the training ranks.

    Attributes:
        config: which loss reads it.
        run: calls a method of every rank's `ModelWorker`.
        vocab_size: of the policy. A teacher of its family may have further rows, which stand for no
            token: they are part of its distribution, and nothing that can be taught.
    """

    config: DistillationConfig
    run: Callable[..., Any]
    vocab_size: int

    def columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """See `Teacher`."""
        if self.config.loss != TOPK:
            return {SAMPLED_LOGPROBS: self.run(ModelWorker.infer_logprobs, batch, TEACHER)}
        readouts = Readouts(num_top=self.config.num_top, top_below=self.vocab_size)
        found = self.run(ModelWorker.infer, batch, readouts, TEACHER)
        return {TOPK_IDS: found.topk_ids_TK, TOPK_LOGPROBS: found.topk_logprobs_TK}


@dataclass(frozen=True)
class ServedTeacher:
    """Rollout engines of the teacher's own.

    Attributes:
        config: which loss reads it.
        ask: of a service over the engines.
        temperature: of the distributions.
        vocab_size: as of `RankTeacher`.
    """

    config: DistillationConfig
    ask: Callable[[Sequence[PromptRequest]], list[PromptLogprobs]]
    temperature: float
    vocab_size: int

    def columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """See `Teacher`."""
        num_top = self.config.num_top if self.config.loss == TOPK else 0
        mask_T, starts = batch.columns["loss_mask"] != 0, batch.cu_seqlens.tolist()
        requests: list[PromptRequest] = []
        places: list[slice] = []
        for start, end in zip(starts, starts[1:], strict=False):
            taught = mask_T[start:end].nonzero().flatten()
            if not len(taught):
                continue
            # Nothing is asked about tokens before the first and after the last that is taught.
            first, last = int(taught[0]), int(taught[-1])
            ids = tuple(batch.input_ids_T[start : start + last + 1].tolist())
            name = f"teacher/{len(requests)}"
            requests.append(
                PromptRequest(name, ids, first, self.temperature, num_top, self.vocab_size)
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
        """Each answer in its place of the step."""
        if self.config.loss != TOPK:
            logprobs_T = torch.zeros(batch.num_tokens)
            for place, answer in zip(places, answers, strict=True):
                logprobs_T[place] = answer.logprobs_N
            return {SAMPLED_LOGPROBS: logprobs_T.masked_fill_(~mask_T, 0.0)}
        shape = batch.num_tokens, self.config.num_top
        ids_TK, logprobs_TK = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for place, answer in zip(places, answers, strict=True):
            if answer.topk_ids_NK is None or answer.topk_logprobs_NK is None:
                raise ValueError(f"{answer.request_id}: nothing was said of its likeliest tokens")
            ids_TK[place], logprobs_TK[place] = answer.topk_ids_NK, answer.topk_logprobs_NK
        untaught_T1 = ~mask_T[:, None]
        return {
            TOPK_IDS: ids_TK.masked_fill_(untaught_T1, 0),
            TOPK_LOGPROBS: logprobs_TK.masked_fill_(untaught_T1, 0.0),
        }
