"""Records of an RL step: metrics with verl's names, and some samples for people to read.

Samples have the sampler-trainer mismatch before the update, if the trainer's logprobs are known.
Promises: training does not depend on kept samples; a failed write loses only that step's samples.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.sequences import group_statistics
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker
from engines.data.read.tokenizer import ChatTokenizer
from engines.rollout.stop_strings import MAX_HELD_TOKENS, UNFINISHED
from engines.trainers.experience import Collector, Experience
from engines.trainers.loop_state import Updates, update_metrics
from engines.trainers.progress import LoopStep
from engines.trainers.step_timer import PhaseClock
from infra.tracking.samples import KeptSample, KeptStep, write_samples

MAX_NUM_TOKENS = 2048
MAX_PROMPT_CHARS = 16_384
NUM_DIGITS = 5

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
        columns = first.batch.select([place]).columns
        half, num_tokens, parts = MAX_NUM_TOKENS // 2, len(token_ids), [slice(None)]
        if num_tokens > MAX_NUM_TOKENS:
            parts = [slice(0, half), slice(num_tokens - half, None)]
        mismatch: tuple[float | None, ...] = ()
        if "old_logprobs" in columns:
            mismatch_T = (columns["old_logprobs"] - columns["rollout_logprobs"])[len(prompt_ids) :]
            mismatch = tuple(_finite(x) for part in parts for x in mismatch_T[part].tolist())
        advantage = None
        if "advantages" in columns:
            advantage = _finite(float(columns["advantages"][len(prompt_ids) :].mean()))
        prompt = self._tokenizer.decode(prompt_ids)
        return KeptSample(
            name=first.name_of(place),
            group=int(first.group_index_B[place]),
            prompt=prompt[:MAX_PROMPT_CHARS] + " [...]" * (len(prompt) > MAX_PROMPT_CHARS),
            tokens=tuple(
                text for part in parts for text in token_texts(self._tokenizer, token_ids[part])
            ),
            num_tokens=num_tokens,
            mismatch=mismatch,
            score=_finite(sample.score),
            reward=_finite(sample.reward),
            advantage=advantage,
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


def _finite(value: float) -> float | None:
    return float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None


def step_metrics(
    collector: Collector,
    experience: Experience,
    updates: Updates,
    clock: PhaseClock,
    num_workers: int,
) -> dict[str, float]:
    """Return a step's metrics of samples, updates and time; throughput is per worker."""
    step_s = clock.elapsed_s
    num_generated = sum(batch.num_generated for batch in collector.batches)
    num_aborted = sum(batch.num_aborted for batch in collector.batches)
    metrics = {
        "training/skipped_steps": float(not experience.trains),
        "training/num_generation_batches": float(len(collector.batches)),
        "training/num_unscored_samples": float(sum(b.num_unscored for b in collector.batches)),
        "training/filter_groups/evicted_samples": float(collector.num_evicted),
        "training/filter_groups/surplus_groups": float(collector.num_surplus_groups),
        "response/aborted_ratio": num_aborted / max(1, num_generated),
        "timing_s/step": step_s,
        "perf/time_per_step": step_s,
        **{f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()},
    }
    if not experience.num_groups:
        return metrics
    num_tokens = float(experience.batch.num_tokens)
    return {
        **metrics,
        **experience_metrics(experience),
        **update_metrics("actor", updates.policy),
        **update_metrics("critic", updates.critic),
        "perf/total_num_tokens": num_tokens,
        "perf/throughput": num_tokens / step_s / num_workers,
    }


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Return scores, rewards, advantages and lengths of the samples of a step."""
    sampled = [sample.trajectory for sample in experience.samples]
    lengths = torch.tensor([each.num_sampled for each in sampled], dtype=torch.float64)
    prompts = torch.tensor([len(t.prompt.token_ids_P) for t in sampled], dtype=torch.float64)
    cut = [each.finish == "length" for each in sampled]
    sampled_T = experience.batch.columns["loss_mask"] > 0
    groups = group_statistics(experience.rewards_B, experience.group_index_B, experience.num_groups)
    metrics = {
        **_spread("critic/score", experience.scores_BR[:, 0].contiguous()),
        **_spread("critic/rewards", experience.rewards_B),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": sum(cut) / len(cut),
        **_spread("prompt_length", prompts),
        "critic/equal_groups": float(groups.equal_P.sum()),
        **experience.metrics,
    }
    # `values` and `returns` exist only with a critic.
    for name in ("advantages", "values", "returns"):
        if name in experience.batch.columns:
            metrics |= _spread(f"critic/{name}", experience.batch.columns[name][sampled_T])
    # The reward's extra values: means over the samples that have them.
    extras: dict[str, list[float]] = {}
    for sample in experience.samples:
        for name, value in sample.extras.items():
            extras.setdefault(name, []).append(value)
    return metrics | {
        f"reward/{name}/mean": sum(own) / len(own) for name, own in sorted(extras.items())
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
