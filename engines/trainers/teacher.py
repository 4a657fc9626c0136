"""What a teacher says of a step's samples, as the columns that distillation reads."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engines.algorithms.distillation.losses import SAMPLED_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS
from engines.config.distillation import TOPK, DistillationConfig
from engines.controller.model_worker import ModelWorker
from engines.training.roles import TEACHER
from engines.types import Readouts, TokenBatch


def teacher_columns(
    config: DistillationConfig, run: Callable[..., Any], batch: TokenBatch, vocab_size: int
) -> dict[str, Tensor]:
    """Ask the teacher.

    Args:
        config: which loss reads it.
        run: calls a method of every rank's `ModelWorker`.
        batch: of the step; the teacher is asked about tokens whose `loss_mask` is not 0.
        vocab_size: of the policy. A teacher of its family may have further rows, which stand for no
            token: they are part of its distribution, and nothing that can be taught.

    Returns:
        Of `topk` (T, K) int64 ids and float32 log-probabilities, else (T,) float32 of the sampled
        tokens; see `engines.algorithms.distillation.losses`.
    """
    if config.loss != TOPK:
        return {SAMPLED_LOGPROBS: run(ModelWorker.infer_logprobs, batch, TEACHER)}
    readouts = Readouts(num_top=config.num_top, top_below=vocab_size)
    found = run(ModelWorker.infer, batch, readouts, TEACHER)
    return {TOPK_IDS: found.topk_ids_TK, TOPK_LOGPROBS: found.topk_logprobs_TK}
