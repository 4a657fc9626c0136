"""The metrics of one RL step, with verl's names."""

import torch
from torch import Tensor

from engines.algorithms.groups import group_statistics
from engines.trainers.loop.phases import PhaseClock
from engines.trainers.step.collector import Collector
from engines.trainers.step.experience import Experience
from engines.trainers.step.updates import Updates, update_metrics
from engines.types import TokenBatch


def step_metrics(
    collector: Collector,
    experience: Experience,
    updates: Updates,
    clock: PhaseClock,
    num_workers: int,
) -> dict[str, float]:
    """Return all metrics of a step except its number; throughput is per worker."""
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
    if experience.num_groups:
        num_tokens = float(experience.batch.num_tokens)
        metrics |= experience_metrics(experience)
        metrics |= update_metrics("actor", updates.policy)
        metrics |= update_metrics("critic", updates.critic)
        metrics["perf/total_num_tokens"] = num_tokens
        metrics["perf/throughput"] = num_tokens / step_s / num_workers
    return metrics


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Return scores, rewards, advantages and lengths of the samples that are trained on."""
    sampled = [sample.trajectory for sample in experience.samples]
    lengths = torch.tensor([each.num_sampled for each in sampled], dtype=torch.float64)
    prompts = torch.tensor([len(t.prompt.token_ids_P) for t in sampled], dtype=torch.float64)
    cut = [each.finish == "length" for each in sampled]
    sampled_T = experience.batch.columns["loss_mask"] > 0
    groups = group_statistics(experience.rewards_B, experience.group_index_B, experience.num_groups)
    return {
        **_spread("critic/score", experience.scores_B),
        **_spread("critic/rewards", experience.rewards_B),
        **_spread("critic/advantages", experience.batch.columns["advantages"][sampled_T]),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": sum(cut) / len(cut),
        **_spread("prompt_length", prompts),
        "critic/equal_groups": float(groups.equal_P.sum()),
        **_of_critic(experience.batch, sampled_T),
        **experience.metrics,
        **_extra_scores(experience),
    }


def _of_critic(batch: TokenBatch, sampled_T: Tensor) -> dict[str, float]:
    """Return the critic's values and their targets; empty without a critic."""
    return {
        key: value
        for name in ("values", "returns")
        if name in batch.columns
        for key, value in _spread(f"critic/{name}", batch.columns[name][sampled_T]).items()
    }


def _extra_scores(experience: Experience) -> dict[str, float]:
    """Return means of the reward's extra values, each over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in experience.samples:
        for name, value in sample.extras.items():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}/mean": sum(own) / len(own) for name, own in sorted(values.items())}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
