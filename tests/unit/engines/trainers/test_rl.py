"""The RL loop in the cases where a division by nothing lurks."""

import math

import pytest

from engines.errors import RewardError, WeightSyncError


def test_a_step_trains_and_reports_finite_numbers(run_round) -> None:
    first, second = run_round("odd_length")
    assert (first["training/global_step"], second["training/global_step"]) == (1, 2)
    assert first["actor/grad_norm"] > 0
    assert first["actor/num_updates"] == 1
    assert all(math.isfinite(value) for value in first.values())
    assert first["critic/score/min"] == 0
    assert first["critic/score/max"] == 1
    # One update per batch: the ratio is 1, and advantages sum to 0 in every group.
    assert first["actor/ppo_kl"] == pytest.approx(0, abs=1e-7)


def test_few_files_lie_between_the_loop_and_the_optimizer(run_round, stacks) -> None:
    """In one process; a group of Ray actors adds `rank_process.py`."""
    run_round("odd_length")
    first, second = stacks
    assert first == second
    assert first[: first.index("engines/trainers/rl.py") + 1] == [
        "engines/training/backends/transformers/engine.py",
        "engines/training/base.py",
        "engines/controller/policy_worker.py",
        "engines/controller/in_process.py",
        "engines/trainers/rl.py",
    ]


def test_equal_rewards_give_no_gradient_and_are_counted(run_round) -> None:
    for metrics in run_round("always"):
        assert metrics["actor/grad_norm"] == 0
        assert metrics["critic/equal_groups"] == 4
        assert metrics["training/skipped_steps"] == 0


def test_a_step_whose_groups_are_all_filtered_is_skipped_and_counted(run_round) -> None:
    filter_groups = {"enable": True, "max_num_gen_batches": 2}
    for metrics in run_round("always", algorithm={"filter_groups": filter_groups}):
        assert metrics["training/skipped_steps"] == 1
        assert metrics["training/num_generation_batches"] == 2
        assert metrics["training/filter_groups/evicted_samples"] == 2 * 4 * 4
        assert "actor/grad_norm" not in metrics
        assert all(math.isfinite(value) for value in metrics.values())


def test_unscored_samples_leave_the_batch(run_round) -> None:
    metrics = run_round("often_broken")[0]
    assert metrics["training/num_unscored_samples"] > 0
    assert math.isfinite(metrics["actor/pg_loss"])


def test_a_broken_reward_stops_the_round(run_round) -> None:
    with pytest.raises(RewardError, match="could not be scored"):
        run_round("often_broken", max_unscored_frac=0.0)


def test_a_sampler_of_another_distribution_stops_the_round(run_round) -> None:
    """top_k truncates what is sampled from and not what is trained."""
    sampling = {"max_new_tokens": 5, "top_k": 3}
    with pytest.raises(WeightSyncError, match="above max_logprob_diff 0.0001"):
        run_round("odd_length", sampling=sampling)


def test_mini_batches_and_epochs_are_updates_of_their_own(run_round) -> None:
    metrics = run_round("odd_length", mini_batch_size_prompts=2, num_epochs=2)[0]
    assert metrics["actor/num_updates"] == 4
    assert metrics["actor/ppo_kl"] != 0
    assert metrics["mismatch/logprob_abs_max"] <= 1e-4
