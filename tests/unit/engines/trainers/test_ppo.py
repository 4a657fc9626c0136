"""Rounds of PPO: the critic is asked, trained and kept, beside the policy and before it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.controller.model_worker import ModelWorker
from engines.trainers.experience import Experience
from engines.types import TokenBatch
from infra.tracking.journal import Journal

Round = Callable[..., list[dict[str, float]]]
GAE = {"adv_estimator": "gae", "options": {"gamma": 0.9, "lam": 0.8, "whiten": False}}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TokenBatch]]:
    """Role and batch of every update."""
    seen: list[tuple[str, TokenBatch]] = []
    train = ModelWorker.train

    def spy(worker: ModelWorker, batch: TokenBatch, loss_fn: Any, role: str = "policy") -> Any:
        seen.append((role, batch))
        return train(worker, batch, loss_fn, role)

    vars(spy).update(vars(train))
    monkeypatch.setattr(ModelWorker, "train", spy)
    return seen


def test_the_critic_learns_before_the_policy_does(
    run_round: Round, trained: list[tuple[str, TokenBatch]]
) -> None:
    steps = run_round(
        "odd_length",
        algorithm=GAE,
        critic={"optimizer": {"lr": 1e-2}, "num_epochs": 3},
        mini_batch_size_prompts=2,
        num_epochs=2,
    )
    assert [role for role, _ in trained] == (["critic"] * 6 + ["policy"] * 4) * 2
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert (step["critic/num_updates"], step["actor/num_updates"]) == (6, 4)
        assert step["critic/lr"] == 1e-2
        assert step["critic/grad_norm"] > 0
        assert {"critic/vf_explained_var", "critic/values/mean", "critic/returns/max"} <= {*step}
    # The head begins at 0, so what it says before the first update is 0 everywhere.
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0
    assert steps[1]["critic/values/max"] != 0


def test_advantages_and_targets_are_those_of_a_float_loop(
    run_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated answer goes on with the critic's value behind it; a finished one ends."""
    seen: list[Experience] = []
    estimate = Experience.with_advantages

    def spy(experience: Experience, *args: Any) -> Experience:
        seen.append(estimate(experience, *args))
        return seen[-1]

    monkeypatch.setattr(Experience, "with_advantages", spy)
    run_round(
        "odd_length",
        algorithm=GAE,
        critic={"optimizer": {"lr": 1e-2}},
        sampling={"max_new_tokens": 3},
        num_steps_per_round=3,
    )
    kinds = set()
    for experience in seen[1:]:  # before the first update all values are 0
        columns, rows = experience.batch.columns, experience.batch.rows
        bounds = experience.batch.cu_seqlens.tolist()
        for number, sample in enumerate(experience.samples):
            own = slice(bounds[number + 1] - sample.trajectory.num_sampled, bounds[number + 1])
            values = columns["values"][own].tolist()
            is_cut = sample.trajectory.finish == "length"
            kinds.add(is_cut)
            behind = float(rows["last_values"][number]) if is_cut else 0.0
            assert float(rows["last_values"][number]) != 0
            want = plain_gae(values, sample.reward, behind)
            assert columns["advantages"][own].tolist() == pytest.approx(want, abs=1e-6)
            targets = [advantage + value for advantage, value in zip(want, values, strict=True)]
            assert columns["returns"][own].tolist() == pytest.approx(targets, abs=1e-6)
    assert kinds == {True, False}


def plain_gae(values: list[float], reward: float, behind: float) -> list[float]:
    """With gamma 0.9, lambda 0.8 and a reward on the last token."""
    found, advantage, following = [], 0.0, behind
    for place in reversed(range(len(values))):
        earned = reward if place == len(values) - 1 else 0.0
        advantage = earned + 0.9 * following - values[place] + 0.9 * 0.8 * advantage
        following = values[place]
        found.append(advantage)
    return found[::-1]


def test_a_warm_up_leaves_the_policy_and_its_version(
    run_round: Round, trained: list[tuple[str, TokenBatch]]
) -> None:
    critic = {"num_warmup_steps": 1, "optimizer": {"lr": 1e-2}}
    first, second = run_round("odd_length", algorithm=GAE, critic=critic)
    assert [role for role, _ in trained] == ["critic", "critic", "policy"]
    assert (first["training/policy_version"], second["training/policy_version"]) == (0, 2)
    assert first["training/skipped_steps"] == 0
    assert first["critic/num_updates"] == 1
    assert "actor/num_updates" not in first
    # No update measured how far the sampler is off, so it was asked for.
    assert first["mismatch/logprob_abs_max"] <= 1e-4


@pytest.mark.parametrize(("num_critic_steps", "of_policy"), [(0, [0, 1]), (1, [1, 1])])
def test_a_warm_up_is_of_the_critic_and_not_of_the_run(
    run_round: Round, num_critic_steps: int, of_policy: list[int]
) -> None:
    """After a rejected round the run has steps behind it, and the critic none."""
    steps = run_round(
        "odd_length",
        algorithm=GAE,
        critic={"num_warmup_steps": 1, "optimizer": {"lr": 1e-2}},
        number=2,
        num_critic_steps=num_critic_steps,
    )
    assert [step["training/global_step"] for step in steps] == [3, 4]
    assert [step.get("actor/num_updates", 0) for step in steps] == of_policy


def test_a_resumed_round_knows_the_steps_of_its_critic(
    run_round: Round, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {
        "algorithm": GAE,
        "critic": {"num_warmup_steps": 3, "optimizer": {"lr": 1e-2}},
        "number": 2,
        "num_critic_steps": 1,
    }
    whole = run_round("odd_length", work="whole", num_steps_per_round=3, **settings)
    write, killed = Journal.metrics, RuntimeError("killed")

    def dying(journal: Journal, step: int, values: Any) -> None:
        if step == 6:
            raise killed
        write(journal, step, values)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "metrics", dying)
        with pytest.raises(RuntimeError, match="killed"):
            run_round("odd_length", work="cut", num_steps_per_round=3, every=1, **settings)
    cut = run_round("odd_length", work="cut", num_steps_per_round=3, every=1, **settings)
    assert [step.get("actor/num_updates", 0) for step in whole] == [0, 0, 1]
    assert [step["training/policy_version"] for step in cut] == [3, 3, 6]
    assert cut[-1]["actor/loss"] == whole[-1]["actor/loss"]
    assert cut[-1]["critic/loss"] == whole[-1]["critic/loss"]


def test_an_update_spoiled_by_a_sample_is_left_out_and_named(
    run_round: Round, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    spoil_first_token(monkeypatch, step=1)
    first, second = run_round("odd_length", mini_batch_size_prompts=2)
    assert first["actor/num_updates"] == 1
    assert second["actor/num_updates"] == 2
    assert [step["training/poisoned_updates"] for step in (first, second)] == [1, 1]
    told = (tmp_path / "journal.jsonl").read_text()
    assert "policy: loss is nan at optimizer step 0; the update is left out; spoiled by " in told
    assert "sample 0" in told


def test_one_more_than_the_limit_stops_the_run(
    run_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_first_token(monkeypatch, step=1)
    with pytest.raises(Exception, match=r"1 updates, more than rl.max_num_poisoned_updates 0"):
        run_round("odd_length", mini_batch_size_prompts=2, max_num_poisoned_updates=0)


def spoil_first_token(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """NaN as the advantage of the first sampled token of a step."""
    estimate, calls = Experience.with_advantages, []

    def spoiled(experience: Experience, *args: Any) -> Experience:
        calls.append(None)
        found = estimate(experience, *args)
        if len(calls) != step:
            return found
        advantages_T = found.batch.columns["advantages"].clone()
        first = int((found.batch.columns["loss_mask"] > 0).nonzero()[0])
        advantages_T[first] = torch.nan
        return found.with_columns(advantages=advantages_T)

    monkeypatch.setattr(Experience, "with_advantages", spoiled)
