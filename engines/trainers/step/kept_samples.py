"""Keep samples of some steps for people to read, with the trainer's logprobs before the update.

Promises: training does not depend on it, and a failed write loses only that step's samples.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker
from engines.data.read.tokenizer import ChatTokenizer
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.step.experience import Experience
from infra.tracking.samples import KeptSample, KeptStep, write_samples

MAX_NUM_TOKENS = 2048
MAX_PROMPT_CHARS = 16_384
NUM_DIGITS = 5
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""A UTF-8 character has at most 4 bytes: if more tokens are incomplete, they are not text."""

logger = logging.getLogger(__name__)


class SampleKeeper:
    """Keeps samples of the configured steps; an `attempt_dir` of None keeps none."""

    def __init__(
        self,
        config: RLRoundStageConfig,
        run: Callable[..., Any],
        tokenizer: ChatTokenizer,
        attempt_dir: Path | None,
    ) -> None:
        self._config, self._run = config.rl.keep_samples, run
        self._tokenizer, self._attempt_dir = tokenizer, attempt_dir
        before = config.num_previous_steps
        self._ends = {before + 1, before + config.rl.num_steps_per_round}
        # Router replay repeats the last inference in the update: no other may come between.
        self._may_infer = not config.training.options.get("router_replay")

    def keep(self, step: LoopStep, experience: Experience) -> None:
        """Keep the first samples of a due step before its first update; a collective call."""
        global_step = step.global_number
        chosen = range(min(self._config.num_per_step, len(experience.samples)))
        due = global_step in self._ends or global_step % self._config.every_num_steps == 0
        if self._attempt_dir is None or not chosen or not due:
            return
        with step.clock("keep_samples"):
            first = experience.take(chosen)
            if "old_logprobs" not in first.batch.columns and self._may_infer:
                logprobs_T = self._run(ModelWorker.infer_logprobs, first.batch)
                first = first.with_columns(old_logprobs=logprobs_T)
            samples = tuple(self._sample(first, place) for place in chosen)
            try:
                write_samples(self._attempt_dir, KeptStep(step=global_step, samples=samples))
            except OSError as error:
                logger.warning("samples of step %d are not kept: %s", global_step, error)

    def _sample(self, first: Experience, place: int) -> KeptSample:
        sample, answer = first.samples[place], first.samples[place].trajectory
        prompt_ids, token_ids = answer.prompt.token_ids_P.tolist(), answer.token_ids.tolist()
        row = first.batch.select([place])
        columns = {name: column[len(prompt_ids) :] for name, column in row.columns.items()}
        half = MAX_NUM_TOKENS // 2
        num_tokens = len(token_ids)
        is_long = num_tokens > MAX_NUM_TOKENS
        parts = [slice(0, half), slice(num_tokens - half, None)] if is_long else [slice(None)]
        mismatch_T = None
        if "old_logprobs" in columns:
            mismatch_T = columns["old_logprobs"] - columns["rollout_logprobs"]
        advantages_T = columns.get("advantages")
        prompt = self._tokenizer.decode(prompt_ids)
        return KeptSample(
            name=first.name_of(place),
            group=int(first.group_index_B[place]),
            prompt=prompt[:MAX_PROMPT_CHARS] + " [...]" * (len(prompt) > MAX_PROMPT_CHARS),
            tokens=tuple(
                text for part in parts for text in token_texts(self._tokenizer, token_ids[part])
            ),
            num_tokens=num_tokens,
            mismatch=() if mismatch_T is None else _numbers(mismatch_T, parts),
            score=_finite(sample.score),
            reward=_finite(sample.reward),
            advantage=None if advantages_T is None else _finite(float(advantages_T.mean())),
            finish_reason=answer.finish,
            extras={name: _finite(value) for name, value in sample.extras.items()},
        )


def token_texts(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a shared character belongs to its last token."""
    texts: list[str] = []
    window: list[int] = []
    known, num_read = "", 0
    for place, token in enumerate(token_ids, 1):
        window.append(token)
        fresh = tokenizer.decode(window)[len(known) :]
        is_held = fresh.endswith(UNFINISHED) and len(window) - num_read < MAX_HELD_TOKENS
        if is_held and place < len(token_ids):
            texts.append("")
            continue
        texts.append(fresh)
        # A token's text may depend on the few tokens before it: these stay in the window.
        del window[:num_read]
        num_read, known = len(window), tokenizer.decode(window)
    return texts


def _numbers(values_T: Tensor, parts: Sequence[slice]) -> tuple[float | None, ...]:
    return tuple(_finite(value) for part in parts for value in values_T[part].tolist())


def _finite(value: float) -> float | None:
    return float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None
