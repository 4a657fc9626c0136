"""From scored samples to the packed batch, on hand-worked numbers."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engines.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from engines.config.rules.models import compared_components, resolved_algorithm
from engines.config.sections import RLConfig
from engines.errors import RewardError
from engines.trainers.experience import Collector, Experience
from engines.trainers.recorder import experience_metrics
from engines.trainers.scoring import ScoredBatch, ScoredSample
from engines.trajectory import Prompt, Segment, Trajectory


def sample(group: int, score: float, tokens: tuple[int, ...] = (7,), shaping: float = 0.0):
    prompt = Prompt(f"prompt={group}", np.array([1, 2, 3], np.int32))
    segment = Segment.sampled(tokens, [-0.5] * len(tokens), [0] * len(tokens))
    return ScoredSample(group, Trajectory(prompt, 0, (segment,), "stop"), score, score + shaping)


def batch(*samples: ScoredSample, unscored: int = 0) -> ScoredBatch:
    return ScoredBatch(samples, len(samples) + unscored, unscored, 0)


def collect(*samples: ScoredSample, size: int = 8, **filter_groups) -> Experience:
    collector = Collector(size, FilterGroupsConfig(**filter_groups))
    collector.add(batch(*samples))
    return collector.experience()


def test_tokens_mask_and_logprobs_stand_behind_their_prompts() -> None:
    packed = collect(sample(0, 1.0, (7, 8)), sample(0, 0.0, (9,))).batch
    assert packed.input_ids_T.tolist() == [1, 2, 3, 7, 8, 1, 2, 3, 9]
    assert packed.cu_seqlens.tolist() == [0, 5, 9]
    assert packed.columns["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert packed.columns["rollout_logprobs"].tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, 0, -0.5]


def test_group_advantages_are_set_on_sampled_tokens_only() -> None:
    """Scores 1, 0, 0, 1: mean 1/2, unbiased std sqrt(1/3); GRPO gives +-(1/2) / (std + 1e-6)."""
    experience = collect(
        sample(0, 1.0), sample(0, 0.0, (7, 8)), sample(0, 0.0), sample(0, 1.0)
    ).with_advantages(AlgorithmConfig())
    value = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    expected = [0, 0, 0, value, 0, 0, 0, -value, -value, 0, 0, 0, -value, 0, 0, 0, value]
    assert experience.batch.columns["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_rewards_not_scores_make_the_advantages() -> None:
    experience = collect(sample(0, 1.0, shaping=-1.0), sample(0, 0.0))
    assert experience.scores_BR[:, 0].tolist() == [1, 0]
    advantages_T = experience.with_advantages(AlgorithmConfig()).batch.columns["advantages"]
    assert advantages_T.abs().max() == 0


def test_equal_score_groups_get_no_gradient_and_stay_unfiltered() -> None:
    experience = collect(sample(4, 1.0), sample(4, 1.0), sample(9, 0.0), sample(9, 1.0))
    assert experience.group_index_B.tolist() == [0, 0, 1, 1]
    advantages_T = experience.with_advantages(AlgorithmConfig()).batch.columns["advantages"]
    assert advantages_T.tolist()[:8] == [0] * 8
    assert advantages_T.tolist()[11] < 0 < advantages_T.tolist()[15]


def test_dynamic_sampling_refills_until_the_step_is_full() -> None:
    collector = Collector(2, FilterGroupsConfig(enable=True))
    collector.add(batch(sample(0, 1.0), sample(0, 1.0), sample(1, 0.0), sample(1, 1.0)))
    assert (collector.full, collector.num_evicted) == (False, 2)
    collector.add(batch(sample(2, 0.0), sample(2, 1.0), sample(3, 0.0), sample(3, 1.0), unscored=1))
    assert (collector.full, collector.num_evicted) == (True, 2)
    experience = collector.experience()
    assert [s.group for s in experience.samples] == [1, 1, 2, 2]
    assert experience.num_groups == 2
    assert [b.num_unscored for b in collector.batches] == [0, 1]
    assert collector.num_surplus_groups == 1


def test_without_the_filter_one_batch_makes_a_step() -> None:
    collector = Collector(2, FilterGroupsConfig())
    collector.add(batch(sample(0, 1.0), sample(0, 1.0)))
    assert collector.full


def test_fault_row_16_step_without_usable_sample_is_empty() -> None:
    experience = collect(sample(0, 1.0), sample(0, 1.0), enable=True)
    assert experience.num_groups == 0
    assert experience.batch.num_tokens == 0
    assert collect().num_groups == 0


def test_mini_batches_keep_whole_groups_in_order_each_epoch() -> None:
    experience = collect(
        sample(0, 0.0, (10,)), sample(0, 1.0, (11,)), sample(1, 0.0, (12,)),
        sample(2, 0.0, (13,)), sample(2, 1.0, (14,)),
    )  # fmt: skip
    last_tokens = [
        mini.input_ids_T[mini.cu_seqlens[1:].long() - 1].tolist()
        for mini in experience.mini_batches(2, 2)
    ]
    assert last_tokens == [[10, 11, 12], [13, 14]] * 2


@pytest.mark.parametrize(
    ("num_groups", "size", "sizes"),
    [(8, 4, [4, 4]), (5, 4, [3, 2]), (9, 4, [3, 3, 3]), (1, 4, [1])],
)
def test_no_optimizer_step_is_made_of_a_rest(num_groups: int, size: int, sizes: list[int]) -> None:
    samples = [sample(group, float(i)) for group in range(num_groups) for i in range(2)]
    batches = list(collect(*samples, size=num_groups).mini_batches(size, 1))
    assert [batch.num_sequences for batch in batches] == [2 * groups for groups in sizes]


def test_a_mini_batch_larger_than_the_step_is_the_step() -> None:
    experience = collect(sample(0, 0.0, (10,)), sample(0, 1.0, (11,)))
    (whole,) = experience.mini_batches(5, 1)
    assert torch.equal(whole.input_ids_T, experience.batch.input_ids_T)


def test_groups_with_no_redrawn_sample_leave_no_empty_update() -> None:
    samples = [sample(group, float(i), (10 + group,)) for group in range(8) for i in range(2)]
    drawn = collect(*samples, size=8).take([6, 6, 7, 15])
    batches = list(drawn.mini_batches(1, 1))
    assert [batch.num_sequences for batch in batches] == [3, 1]
    assert [batch.num_sequences for batch in drawn.mini_batches(2, 1)] == [4]


def test_only_kept_samples_are_trained_but_metrics_cover_all() -> None:
    scores = [(0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0), (2, 0.0), (2, 1.0)]
    samples = [sample(group, score, (10 + i,)) for i, (group, score) in enumerate(scores)]
    keep = AlgorithmConfig(adv_estimator="raft", options={"raft_min_reward": 1.0})
    whole = collect(*samples)
    whole = whole.with_columns(uniform=torch.arange(whole.batch.num_tokens).double() / 100)
    chosen = whole.with_advantages(keep)
    assert len(chosen.samples) == 6
    assert chosen.metrics["critic/num_kept_samples"] == 2
    last_tokens = [
        mini.input_ids_T[mini.cu_seqlens[1:].long() - 1].tolist()
        for mini in chosen.mini_batches(1, 1)
    ]
    assert last_tokens == [[10], [15]]
    assert [chosen.trains, chosen.take([1, 5]).trains, chosen.take([1, 2]).trains] == [1, 1, 0]
    assert list(chosen.take([1, 2]).mini_batches(1, 1)) == []


class Watched(ScoredSample):
    """A sample that counts who looks at what its reward reported."""

    looks: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "extras":
            Watched.looks.append(name)
        return super().__getattribute__(name)


def num_looks(size: int) -> int:
    """Of the advantages and the metrics of a step."""
    made = Watched(0, sample(0, 1.0).trajectory, 1.0, 1.0, {"acc": 1.0, "length": 3.0})
    experience = collect(*[made] * size)
    Watched.looks.clear()
    experience_metrics(experience.with_advantages(AlgorithmConfig()))
    return len(Watched.looks)


def test_the_work_on_a_step_grows_as_its_samples_do() -> None:
    assert num_looks(64) == 2 * num_looks(32)


def test_a_metric_is_the_mean_over_the_samples_that_report_it() -> None:
    """Those of another route, or with a number that was not finite, do not hide the others'."""
    given = [{"form": 1.0, "tests": 4.0}, {"form": 0.0}, {"tests": 0.0}]
    experience = collect(*[replace(sample(0, 1.0), extras=extras) for extras in given])
    metrics = experience_metrics(experience.with_advantages(AlgorithmConfig()))
    means = {name: metrics[name] for name in metrics if name.startswith("reward/")}
    assert means == {"reward/form/mean": 0.5, "reward/tests/mean": 2.0}


MIXTURE = {
    "function": "mixture",
    "components": {
        "correct": {"function": "math"},
        "verbosity": {"function": "length", "weight": -0.9},
    },
    "accuracy": ["correct"],
}


def gdpo_of(**reward: Any) -> AlgorithmConfig:
    """As a round makes it of its mixture."""
    return resolved_algorithm(
        RLConfig.model_validate(
            {"algorithm": {"adv_estimator": "gdpo"}, "reward": {**MIXTURE, **reward}}
        )
    )


def answer(correct: float, verbosity: float) -> ScoredSample:
    extras = {"correct": correct, "verbosity": verbosity, "acc": correct}
    return replace(sample(0, correct - 0.9 * verbosity), extras=extras)


def test_gdpo_holds_a_penalty_of_a_mixture_for_a_penalty() -> None:
    """Components +-u each; u(1 - 0.9), u(1 + 0.9), -u(1 + 0.9), -u(1 - 0.9), whitened."""
    step = collect(answer(1, 1), answer(1, 0), answer(0, 1), answer(0, 0))
    found = step.with_advantages(gdpo_of()).batch.columns["advantages"][3::4]
    std = math.sqrt(2 * (0.1**2 + 1.9**2) / 3)
    expected = [value / std for value in (0.1, 1.9, -1.9, -0.1)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_refuses_a_sample_lacking_a_compared_component() -> None:
    lacks = replace(answer(0, 0), extras={"correct": 0.0})
    with pytest.raises(
        RewardError,
        match=r"prompt=0 sample 0: the reward gave no finite number called 'verbosity', which",
    ):
        collect(answer(1, 1), lacks).check_components(compared_components(gdpo_of()))
