"""The metrics of one RL step, by the names that users of verl know."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engines.algorithms.groups import group_statistics
from engines.trainers.experience import Collector, Experience
from engines.types import TrainMetrics


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Scores, rewards, advantages and lengths of the samples that are trained on."""
    completions = [sample.completion for sample in experience.samples]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    prompts = torch.tensor([len(s.prompt_ids) for s in experience.samples], dtype=torch.float64)
    cut = [float(c.finish_reason == "length") for c in completions]
    sampled_T = experience.batch.columns["loss_mask"] > 0
    groups = group_statistics(
        experience.rewards_B, experience.group_index_B, experience.num_groups
    )
    return {
        **_spread("critic/score", experience.scores_B),
        **_spread("critic/rewards", experience.rewards_B),
        **_spread("critic/advantages", experience.batch.columns["advantages"][sampled_T]),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": sum(cut) / len(cut),
        **_spread("prompt_length", prompts),
        "critic/equal_groups_frac": float(groups.equal_P.double().mean()),
        "perf/total_num_tokens": float(experience.batch.num_tokens),
    }


def collection_metrics(collector: Collector, num_unscored: int, num_aborted: int) -> dict[str, float]:
    """What became of the completions that were generated."""
    return {
        "training/num_generation_batches": float(collector.num_generation_batches),
        "training/num_unscored_samples": float(num_unscored),
        "training/filter_groups/evicted_samples": float(collector.num_evicted),
        "response/aborted_ratio": num_aborted / max(1, collector.num_generated),
    }


def update_metrics(updates: Sequence[TrainMetrics]) -> dict[str, float]:
    """The optimizer steps of one RL step: their mean, and the largest of every maximum."""
    merged: dict[str, list[float]] = {}
    for update in updates:
        own = {"actor/loss": update.loss, "actor/grad_norm": update.grad_norm}
        for name, value in {**own, **update.metrics}.items():
            merged.setdefault(name, []).append(value)
    return {
        **{
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in merged.items()
        },
        "actor/lr": updates[-1].lr,
        "actor/num_updates": float(len(updates)),
    }


def timing_metrics(
    seconds: Mapping[str, float], step_s: float, num_tokens: float, num_workers: int
) -> dict[str, float]:
    """Wall seconds by phase, and tokens per second and worker."""
    return {
        **{f"timing_s/{phase}": value for phase, value in seconds.items()},
        "timing_s/step": step_s,
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / step_s / num_workers,
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
