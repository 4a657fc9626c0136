"""The RL loop in the cases where a division by nothing lurks."""

import gc
import itertools
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engines.controller.rollout import ServedRollout
from engines.errors import NothingToTrainOnError, RewardError, RolloutError, WeightSyncError
from engines.jobs.process.runtime import phase_of
from engines.rewards.scorer import ScoringBatch
from engines.rollout.transformers.engine import TransformersEngine
from engines.trainers.experience import Collector
from engines.trainers.mismatch import LOGPROB_MEAN, WeightProbe
from engines.trainers.progress import LoopStep
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import BatchScoring
from engines.types import Completion
from engines.weight_sync.base import SyncReport
from infra.tracking.journal import read_records

PUBLISHING = "engines/rollout/publishing.py"
COLLECT = "engines/rollout/collect.py"
TRUNCATED = {"max_new_tokens": 5, "top_k": 3}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that weights were published under, in order."""
    versions: list[int] = []
    publish = ServedRollout.publish

    def spy(rollout: ServedRollout, version: int, probe: WeightProbe):
        versions.append(version)
        return publish(rollout, version, probe)

    monkeypatch.setattr(ServedRollout, "publish", spy)
    return versions


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


def test_samples_are_scored_as_they_come_and_steps_are_the_same(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, accept = ServedRollout.generate, BatchScoring.accept
    handed_over: list[list[Completion]] = []

    def spy_accept(scoring: BatchScoring, completion: Completion) -> None:
        handed_over[-1].append(completion)
        accept(scoring, completion)

    def early(rollout: ServedRollout, requests, receive):
        handed_over.append([])
        rows = generate(rollout, requests, receive)
        assert {*map(id, handed_over[-1])} == {id(each) for row in rows for each in row}
        return rows

    def late(rollout: ServedRollout, requests, _):
        return generate(rollout, requests)

    monkeypatch.setattr(BatchScoring, "accept", spy_accept)
    monkeypatch.setattr(ServedRollout, "generate", early)
    found = run_round("odd_length", work="early")
    assert [len(each) for each in handed_over] == [16, 16]
    monkeypatch.setattr(ServedRollout, "generate", late)
    for one, other in zip(found, run_round("odd_length", work="late"), strict=True):
        assert one["actor/grad_norm"] == other["actor/grad_norm"]
        assert one["critic/score/mean"] == other["critic/score/mean"]


def test_sampler_holds_no_weights_or_cache_while_training(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    engines: list[TransformersEngine] = []
    publish = ServedRollout.publish

    def spy(rollout: ServedRollout, version: int, probe: WeightProbe):
        engines[:] = [cast(TransformersEngine, slot.engine) for slot in rollout._pool.slots]
        return publish(rollout, version, probe)

    def look(*_: object) -> None:
        (engine,) = engines
        weights = sum(weight.nbytes for weight in engine._model._model.parameters())
        held.append(weights + engine._batch._cache.size_bytes)

    monkeypatch.setattr(ServedRollout, "publish", spy)
    handle = register_optimizer_step_pre_hook(look)
    try:
        run_round("odd_length")
    finally:
        handle.remove()
    assert held == [0, 0]


def test_few_files_lie_between_the_loop_and_the_optimizer(run_round, stacks) -> None:
    """In one process; a group of Ray actors adds `ray_group.py`."""
    run_round("odd_length")
    first, second = stacks
    assert first == second
    assert first[: first.index("engines/trainers/rl.py") + 1] == [
        "engines/training/backends/transformers/module_engine.py",
        "engines/training/base.py",
        "engines/controller/model_worker.py",
        "engines/controller/worker_group.py",
        "engines/trainers/rl.py",
    ]


def test_few_files_lie_between_the_loop_and_a_sampled_token(run_round, sampling_stacks) -> None:
    """The loop's thread and the one that samples for it, together."""
    run_round("odd_length")
    answered = [files for files in sampling_stacks if PUBLISHING not in files]
    assert len(answered) < len(sampling_stacks)  # the probes after a sync
    # The loop's thread waits, or takes samples that are finished.
    sampled = [files for files in answered if COLLECT not in files]
    assert sampled
    for files in sampled:
        on_the_way = files[: files.index("engines/trainers/rl.py") + 1]
        # A decode step; prompts are computed without it.
        assert [each for each in on_the_way if not each.endswith("/decode_graphs.py")] == [
            "engines/rollout/transformers/sampling.py",
            "engines/rollout/transformers/running_batch.py",
            "engines/rollout/transformers/engine.py",
            "engines/rollout/event_loop.py",
            "engines/rollout/service.py",
            "engines/trainers/rl.py",
        ]


def test_fault_row_16_equal_rewards_are_counted_without_gradient(run_round) -> None:
    for metrics in run_round("always"):
        assert metrics["actor/grad_norm"] == 0
        assert metrics["critic/equal_groups"] == 4
        assert metrics["training/skipped_steps"] == 0


def test_fault_row_16_fully_filtered_step_is_skipped_and_counted(
    run_round,
) -> None:
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


def changed(
    completion: Completion, *, version: int | None = None, finish_reason: str | None = None
) -> Completion:
    """The same sample of another version, or that ended otherwise."""
    own = completion.policy_versions
    return Completion(
        completion.request_id,
        completion.sample_index,
        completion.token_ids,
        completion.logprobs,
        own if version is None else [version] * len(own),
        finish_reason or completion.finish_reason,
    )


def test_a_round_stops_rather_than_train_on_its_shortest_answers(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of each group is unfinished at the deadline; the probe's requests ask for one sample."""
    generate = ServedRollout.generate

    def late(*args):
        rows = generate(*args)
        return [
            [
                changed(each, finish_reason="abort") if place > 1 else each
                for place, each in enumerate(row)
            ]
            for row in rows
        ]

    monkeypatch.setattr(ServedRollout, "generate", late)
    with pytest.raises(RolloutError, match=r"rollout.timeout_s: got 1800; 8 of 16 samples"):
        run_round("odd_length")
    for metrics in run_round("odd_length", work="allowed", max_aborted_frac=0.5):
        assert metrics["response/aborted_ratio"] == 0.5


def test_a_sampler_of_another_distribution_stops_the_round(run_round) -> None:
    """top_k truncates what is sampled from and not what is trained."""
    with pytest.raises(WeightSyncError, match=r"above rl.mismatch.mean 0.0001"):
        run_round("odd_length", sampling=TRUNCATED)


def test_broken_sampler_with_equal_scores_stops_the_round(run_round) -> None:
    """Every group is filtered, so nothing trains; the samples are compared all the same."""
    filtered = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    with pytest.raises(WeightSyncError, match=r"above rl.mismatch.mean 0.0001"):
        run_round("always", sampling=TRUNCATED, algorithm=filtered)
    (metrics,) = run_round("always", num_steps_per_round=1, algorithm=filtered)
    assert 0 < metrics["mismatch/logprob_abs_mean"] <= metrics["mismatch/logprob_abs_max"] <= 1e-4


def test_bfloat16_rounding_passes_but_other_distribution_fails(run_round) -> None:
    training = {"dtype": "bfloat16"}
    with pytest.raises(WeightSyncError, match=r"above rl.mismatch.mean 0.1"):
        run_round("odd_length", training=training, sampling=TRUNCATED)
    for metrics in run_round("odd_length", training=training):
        assert 1e-4 < metrics["mismatch/logprob_abs_mean"] < 0.02


def test_too_many_steps_in_a_row_without_training_stop_the_round(run_round, synced) -> None:
    filtered = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    with pytest.raises(NothingToTrainOnError, match="step 3: 3 steps in a row.*more than rl.max"):
        run_round("always", num_steps_per_round=4, algorithm=filtered)
    assert synced == [0]


def test_steps_that_the_round_before_skipped_last_count(run_round) -> None:
    filtered = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    with pytest.raises(NothingToTrainOnError, match="step 2: 3 steps in a row"):
        run_round("always", num_skipped=1, algorithm=filtered)


def test_versions_follow_the_weights(run_round, synced: list[int]) -> None:
    """A skipped step makes no version, and a resumed round publishes under the last one."""
    filtered = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    first = run_round("odd_length", num_steps_per_round=2)
    assert synced == [0, 1, 2]
    assert [metrics["training/policy_version"] for metrics in first] == [1, 2]
    run_round("always", num_steps_per_round=4, algorithm=filtered)
    assert synced == [0, 1, 2, 2]
    run_round("odd_length", num_steps_per_round=5)
    assert synced == [0, 1, 2, 2, 2, 5]


def test_samples_with_another_weight_version_are_refused(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*args) -> list[list[Completion]]:
        return [[changed(c, version=7) for c in row] for row in generate(*args)]

    generate = ServedRollout.generate
    monkeypatch.setattr(ServedRollout, "generate", stale)
    with pytest.raises(RolloutError, match=r"versions \[7\], published is 0"):
        run_round("odd_length", sampling={"max_new_tokens": 5})


def test_fault_row_12_a_sync_that_is_skipped_stops_the_round(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer forgets to send what it trained, and counts on."""
    publish = ServedRollout.publish
    reports: list[SyncReport] = []

    def forgetful(rollout: ServedRollout, version: int, probe: WeightProbe) -> SyncReport:
        if version != 1:
            reports.append(publish(rollout, version, probe))
        return reports[-1]

    monkeypatch.setattr(ServedRollout, "publish", forgetful)
    with pytest.raises(RolloutError, match="no confirmed weights; send them first"):
        run_round("odd_length")


def test_fault_row_13_a_slow_drift_is_told_each_step_and_stopped(
    run_round, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler whose temperature leaves the trainer's by 5e-5, then by twice as much each step."""
    generate, num_calls = ServedRollout.generate, itertools.count()

    def drifting(rollout: ServedRollout, requests, receive):
        off = 1 + 5e-5 * 2 ** next(num_calls)
        return generate(
            rollout,
            [replace(r, sampling=replace(r.sampling, temperature=off)) for r in requests],
            receive,
        )

    monkeypatch.setattr(ServedRollout, "generate", drifting)
    with pytest.raises(WeightSyncError, match=f"{LOGPROB_MEAN} is .*, above rl.mismatch.mean"):
        run_round("odd_length", num_steps_per_round=9)
    records, _ = read_records(tmp_path / "journal.jsonl", 0)
    told = [r.values[LOGPROB_MEAN] for r in records if r.kind == "metrics"]
    assert len(told) >= 3
    assert told == sorted(told)
    assert told[-1] < 1e-4


def test_mini_batches_and_epochs_are_updates_of_their_own(run_round) -> None:
    metrics = run_round("odd_length", mini_batch_size_prompts=2, num_epochs=2)[0]
    assert metrics["actor/num_updates"] == 4
    assert metrics["actor/ppo_kl"] != 0
    assert metrics["mismatch/logprob_abs_max"] <= 1e-4


def test_the_batch_of_a_step_is_freed_before_the_next_one_begins(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref] = []
    generate = RLTrainer.generate

    def spy(trainer: RLTrainer, step: LoopStep, version: int) -> Collector:
        assert not [each for each in held if each() is not None]
        collected = generate(trainer, step, version)
        held.append(weakref.ref(collected))
        return collected

    monkeypatch.setattr(RLTrainer, "generate", spy)
    gc.disable()  # no cycle holds it either
    try:
        run_round("odd_length")
    finally:
        gc.enable()
    assert len(held) == 2


def test_reward_failure_during_sampling_is_a_scoring_error(
    run_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: ScoringBatch, key: object, sample: object) -> None:
        raise RewardError("the reward function cannot be loaded")

    monkeypatch.setattr(ScoringBatch, "add", broken)
    with pytest.raises(RewardError) as told:
        run_round("odd_length")
    assert phase_of(told.value) == "reward"
