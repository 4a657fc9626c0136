"""Rounds of RL with each algorithm: its parts get what they read, and the step trains."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint.sharded import ShardedReader
from engines.config.rows import ADVANTAGES, POLICY_LOSSES
from engines.controller.rollout import ServedRollout
from engines.errors import NothingToTrainOnError
from engines.rewards.base import Score
from engines.trainers.experience import KL_IN_REWARD, Experience
from engines.trainers.recorder import SampleKeeper
from engines.trainers.scoring import BatchScoring
from engines.types import RolloutRequest, TokenBatch

Round = Callable[..., list[dict[str, float]]]
UNMADE = {"values", "last_values"}
ESTIMATORS = [row.name for row in ADVANTAGES.rows if not UNMADE & {*row.columns, *row.rows}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_round_with_each_estimator(run_round: Round, name: str) -> None:
    options = {"gdpo_reward_keys": ["score"]} if name == "gdpo" else {}
    steps = run_round("odd_length", algorithm={"adv_estimator": name, "options": options})
    assert [step["training/skipped_steps"] for step in steps] == [0, 0]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert any(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("row", POLICY_LOSSES.rows, ids=lambda row: row.name)
def test_a_round_with_each_loss(run_round: Round, row) -> None:
    algorithm = {"loss_mode": row.name, "loss_agg_mode": row.loss_agg_mode or "token-mean"}
    steps = run_round("odd_length", algorithm=algorithm, mini_batch_size_prompts=2)
    assert [step["actor/num_updates"] for step in steps] == [2, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert any(step["actor/grad_norm"] > 0 for step in steps)


def test_remax_samples_one_greedy_answer_for_each_prompt(
    run_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[RolloutRequest]] = []
    judged: list[list[list[Score | None]]] = []
    trained: list[Experience] = []
    generate, score = ServedRollout.generate, BatchScoring.scores
    estimate = Experience.with_advantages

    def spy_generate(rollout: ServedRollout, requests: Sequence[RolloutRequest], *receive: Any):
        asked.append(requests)
        return generate(rollout, requests, *receive)

    def spy_scores(*args: Any) -> list[list[Score | None]]:
        judged.append(score(*args))
        return judged[-1]

    def spy_estimate(experience: Experience, *args: Any) -> Experience:
        trained.append(estimate(experience, *args))
        return trained[-1]

    monkeypatch.setattr(ServedRollout, "generate", spy_generate)
    monkeypatch.setattr(BatchScoring, "scores", spy_scores)
    monkeypatch.setattr(Experience, "with_advantages", spy_estimate)
    run_round("odd_length", algorithm={"adv_estimator": "remax"})
    for requests, scores, experience in zip(asked, judged, trained, strict=True):
        sampled, greedy = requests[:4], requests[4:]
        assert [request.sampling.temperature for request in greedy] == [0.0] * 4
        assert [request.num_samples for request in greedy] == [1] * 4
        assert [r.prompt_ids for r in sampled] == [r.prompt_ids for r in greedy]
        baselines = [score.value for (score,) in scores[4:] if score is not None]
        want = [baselines[group] for group in experience.group_index_B.tolist()]
        assert experience.batch.rows["greedy_scores"].tolist() == want
        assert _advantages(experience) == [
            sample.score - baseline
            for sample, baseline in zip(experience.samples, want, strict=True)
        ]


def test_a_kl_in_the_reward_steers_its_coefficient(run_round: Round) -> None:
    algorithm = {
        "adv_estimator": "reinforce_plus_plus",
        "use_kl_in_reward": True,
        "kl_penalty": "k2",
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "horizon": 100, "target_kl": 1e-3},
    }
    first, second = run_round("odd_length", algorithm=algorithm)
    # Policy and reference are equal at first: the error is -1, clipped to -0.2; 16 samples.
    assert first[KL_IN_REWARD] == 0
    assert first[f"{KL_IN_REWARD}_coeff"] == 0.5
    assert second[f"{KL_IN_REWARD}_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 100))
    assert second[KL_IN_REWARD] > 0


def test_the_coefficient_goes_on_where_the_round_before_ended(run_round: Round) -> None:
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.5}}
    steps = run_round("odd_length", kl_coef=0.125, algorithm=algorithm)
    assert [step[f"{KL_IN_REWARD}_coeff"] for step in steps] == [0.125, 0.125]


def test_pf_ppo_redraws_samples_by_reward_and_keeps_advantages(
    run_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Experience] = []
    after: list[Experience] = []
    take = Experience.take

    def spy(experience: Experience, samples: Sequence[int]) -> Experience:
        before.append(experience)
        after.append(take(experience, samples))
        return after[-1]

    monkeypatch.setattr(Experience, "take", spy)
    monkeypatch.setattr(SampleKeeper, "keep", lambda *_: None)  # it takes some, too
    steps = run_round("odd_length", algorithm={"pf_ppo": {"enable": True}})
    assert len(after) == len(steps) == 2
    for whole, drawn in zip(before, after, strict=True):
        # |R|^2 is 0 for a reward of 0: such a sample is only kept where its prompt has no other.
        best = _best_by_group(whole)
        assert any(sample.reward < best[sample.group] for sample in whole.samples)
        assert all(sample.reward == best[sample.group] for sample in drawn.samples)
        assert len(drawn.samples) == len(whole.samples)
        own = dict(zip(map(id, whole.samples), _advantages(whole), strict=True))
        assert [own[id(sample)] for sample in drawn.samples] == _advantages(drawn)


def test_raft_trains_on_what_it_keeps_and_tells_of_every_sample(
    run_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Experience, list[TokenBatch]]] = []
    mini_batches = Experience.mini_batches

    def spy(experience: Experience, *sizes: int):
        seen.append((experience, list(mini_batches(experience, *sizes))))
        return iter(seen[-1][1])

    monkeypatch.setattr(Experience, "mini_batches", spy)
    options = {"raft_num_kept": 2, "raft_min_reward": 1.0}
    algorithm = {"adv_estimator": "raft", "loss_mode": "reinforce", "options": options}
    steps = run_round("odd_length", algorithm=algorithm)
    for step, (experience, batches) in zip(steps, seen, strict=True):
        assert len(experience.samples) == 16
        assert step["critic/score/mean"] < 1
        trained = [int(row) for batch in batches for row in batch.rows["row"]]
        assert len(trained) == step["critic/num_kept_samples"] > 0
        assert all(experience.samples[row].reward == 1 for row in trained)


def test_a_step_of_which_nothing_is_kept_is_skipped(run_round: Round) -> None:
    options = {"raft_min_reward": 2.0}
    steps = run_round("odd_length", algorithm={"adv_estimator": "raft", "options": options})
    assert [step["training/skipped_steps"] for step in steps] == [1, 1]
    assert [step["training/policy_version"] for step in steps] == [0, 0]
    assert not any("actor/num_updates" in step for step in steps)


def test_step_with_no_kept_sample_counts_as_skipped_in_a_row(run_round: Round) -> None:
    algorithm = {"adv_estimator": "raft", "options": {"raft_min_reward": 2.0}}
    with pytest.raises(NothingToTrainOnError, match="left out by the estimator"):
        run_round("odd_length", num_skipped=2, algorithm=algorithm)


def test_round_commits_the_average_but_samples_from_the_policy(
    run_round: Round, tmp_path: Path
) -> None:
    plain = run_round("odd_length")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "journal.jsonl").unlink()
    ema = {"decay": 0.5, "use_warmup": False}
    steps = run_round("odd_length", optimizer={"lr": 1e-2, "weight_decay": 0.0, "ema": ema})
    assert [step["critic/score/mean"] for step in steps] == [
        step["critic/score/mean"] for step in plain
    ]
    last, committed = (
        ShardedReader(tmp_path / "checkpoints" / place / "step-00000002/checkpoint/tensors")
        for place in ("", "averaged")
    )
    averages = [name for name in last.names() if name.startswith("optimizer.ema.")]
    assert averages
    for name in averages:
        of_model = name.replace("optimizer.ema.", "model.", 1)
        assert torch.equal(committed.read(of_model), last.read(name))
        assert not torch.equal(committed.read(of_model), last.read(of_model))


def _best_by_group(experience: Experience) -> dict[int, float]:
    best: dict[int, float] = {}
    for sample in experience.samples:
        best[sample.group] = max(sample.reward, best.get(sample.group, 0.0))
    return best


def _advantages(experience: Experience) -> list[float]:
    last_B = experience.batch.cu_seqlens[1:] - 1
    return experience.batch.columns["advantages"][last_B.long()].tolist()


def test_what_a_reward_reports_becomes_metrics_and_components(run_round: Round) -> None:
    algorithm = {
        "adv_estimator": "gdpo",
        "options": {"gdpo_reward_keys": ["score", "digits"], "gdpo_reward_weights": [1.0, 0.5]},
        "positive_nll_coef": 0.1,
    }
    steps = run_round("two_components", algorithm=algorithm)
    for step in steps:
        assert step["reward/acc/mean"] == step["critic/score/mean"]
        assert 0 <= step["reward/digits/mean"] <= 5
        assert "reward/note/mean" not in step
        assert step["actor/positive_nll"] > 0
