"""Supervised training on a real tiny model: when it ends, and what a later attempt repeats."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.checkpoint.engine_state import read_scalars
from engines.checkpoint.sharded import ShardedReader
from engines.checkpoint.step_store import StepCheckpoints
from engines.config.rollout import RolloutConfig
from engines.config.sections import SFTConfig
from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_group
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.data.read.examples import SFTExamples, sft_examples
from engines.data.read.rows import Message, SFTRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.trainers.progress import LoopStep, StageProgress
from engines.trainers.step_timer import PhaseClock
from engines.trainers.supervised.trainer import (
    LOSS_AVERAGE,
    SupervisedTrainer,
    moving_average,
)
from engines.trainers.supervised.training_set import Conversations
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import PoisonedUpdate, TokenBatch
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal, read_records

NUM_STEPS = 6


@dataclass(frozen=True)
class Attempt:
    """What one attempt did and left behind."""

    num_steps: int
    losses: dict[int, float]
    checkpoints: StepCheckpoints
    committed: Path


@pytest.fixture(scope="session")
def examples(tiny_model: Path) -> SFTExamples:
    rows = [
        SFTRow((Message("user", f"{i}+{i}="), Message("assistant", str(2 * i)))) for i in range(8)
    ]
    return sft_examples(rows, DirectoryTokenizer.load(tiny_model), 32)


@pytest.fixture
def train(tiny_model: Path, examples: SFTExamples) -> Callable[..., Attempt]:
    def train(
        work: Path,
        *,
        target_loss: float | None = None,
        num_steps: int = NUM_STEPS,
        every_num_steps: int = 100,
        ema: EmaConfig | None = None,
    ) -> Attempt:
        work.mkdir(exist_ok=True)
        config = SFTConfig(
            num_steps=num_steps,
            batch_size_sequences=4,
            target_loss=target_loss,
            optimizer=OptimizerConfig(lr=1e-2, ema=ema),
        )
        spec = WorkerSpec(
            roles={
                POLICY: RoleSpec(
                    ModelSource(tiny_model),
                    TrainingConfig(num_threads=1),
                    config.optimizer,
                    total_num_steps=NUM_STEPS,
                )
            },
            serving_dir=tiny_model,
            rollout=RolloutConfig(),
            temperature=1.0,
            platform="cpu",
            seed=0,
        )
        checkpoints = StepCheckpoints(work / "checkpoints", 10)
        with (
            closing(launch_policy_group(spec, work)) as workers,
            closing(Journal(work / "journal.jsonl")) as journal,
        ):
            heartbeat = Heartbeat(work / "heartbeat.json", 60.0)
            progress = StageProgress(
                journal, heartbeat, checkpoints, every_num_steps, num_steps, PhaseClock()
            )
            rows = Conversations(examples)
            done = SupervisedTrainer(config, rows, 4, workers, progress, 0, "sft").train().num_steps
            committed = progress.last_checkpoint()
        records, _ = read_records(work / "journal.jsonl", 0)
        losses = {
            record.step: record.values["train/loss"]
            for record in records
            if record.kind == "metrics" and record.step and "train/loss" in record.values
        }
        return Attempt(done, losses, checkpoints, committed)

    return train


def averages(losses: dict[int, float]) -> list[float]:
    """The average after each step, as the weighted sum it stands for."""
    values = [losses[step] for step in sorted(losses)]
    return [
        0.9**last * values[0]
        + sum(0.1 * 0.9 ** (last - place) * values[place] for place in range(1, last + 1))
        for last in range(len(values))
    ]


def test_the_moving_average_by_hand() -> None:
    first = moving_average(None, 4.0)
    second = moving_average(first, 2.0)
    third = moving_average(second, 1.0)
    assert first == 4.0
    assert second == pytest.approx(3.8)  # 0.9 * 4 + 0.1 * 2
    assert third == pytest.approx(3.52)  # 0.9 * 3.8 + 0.1 * 1


def test_few_files_lie_between_the_loop_and_the_optimizer(
    train: Callable[..., Attempt], stacks: list[list[str]], tmp_path: Path
) -> None:
    train(tmp_path / "work", num_steps=1)
    (files,) = stacks
    assert files.index("engines/trainers/supervised/trainer.py") == 4
    assert len(files) == 5


def test_without_a_target_every_step_is_done(train: Callable[..., Attempt], tmp_path: Path) -> None:
    attempt = train(tmp_path / "whole")
    assert attempt.num_steps == NUM_STEPS
    assert sorted(attempt.losses) == list(range(1, NUM_STEPS + 1))
    assert attempt.checkpoints.steps() == [NUM_STEPS]


def test_the_training_loss_alone_decides_the_end(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole")
    course = averages(whole.losses)
    assert course[2] < min(course[:2]), "the model learns, so the third average is a new low"
    early = train(tmp_path / "early", target_loss=(course[1] + course[2]) / 2)
    assert early.num_steps == 3
    assert early.losses == {step: whole.losses[step] for step in (1, 2, 3)}
    assert early.checkpoints.steps() == [3], "the last step has its checkpoint, due or not"


def test_an_attempt_after_the_end_does_no_step(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    work = tmp_path / "early"
    first = train(work, target_loss=1e6)
    assert first.num_steps == 1
    again = train(work, target_loss=1e6)
    assert again.num_steps == 1
    assert again.losses == first.losses
    assert again.checkpoints.steps() == [1]


def test_the_average_survives_a_kill_bit_for_bit(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    """A killed attempt leaves a step checkpoint; from it the end is the same step and bits."""
    course = averages(train(tmp_path / "whole").losses)
    target = (course[3] + course[4]) / 2
    unbroken = train(tmp_path / "unbroken", target_loss=target)
    work = tmp_path / "killed"
    train(work, target_loss=target, num_steps=2)
    resumed = train(work, target_loss=target)
    assert (unbroken.num_steps, resumed.num_steps) == (5, 5)
    assert resumed.losses == unbroken.losses

    def kept(attempt: Attempt, step: int) -> float:
        return float(attempt.checkpoints.load(step).state.values[LOSS_AVERAGE])

    assert kept(resumed, 2) == pytest.approx(course[1], rel=1e-12)
    assert kept(resumed, 5) == kept(unbroken, 5)


def tensors_of(checkpoint: Path, part: str) -> dict[str, torch.Tensor]:
    reader = ShardedReader(checkpoint / "tensors")
    names = [name for name in reader.names() if name.startswith(part)]
    return {name.removeprefix(part): reader.read(name) for name in names}


def test_commit_holds_the_average_and_steps_hold_the_weights(
    train: Callable[..., Attempt], tiny_model: Path, tmp_path: Path
) -> None:
    ema = EmaConfig(decay=0.75, use_warmup=False)
    plain = train(tmp_path / "plain", every_num_steps=1)
    averaged = train(tmp_path / "averaged", every_num_steps=1, ema=ema)
    assert averaged.losses == plain.losses
    course = [load_file(tiny_model / "model.safetensors")]
    for step in range(1, NUM_STEPS + 1):
        weights = tensors_of(plain.checkpoints.load(step).path, "model.")
        course.append(weights)
        kept = averaged.checkpoints.load(step).path
        for name, tensor in tensors_of(kept, "model.").items():
            assert torch.equal(tensor, weights[name])
    # 0.75^6 of the first weights, and 0.25 * 0.75^(6 - t) of those after step t.
    shares = [0.75**6, *(0.25 * 0.75 ** (6 - step) for step in range(1, NUM_STEPS + 1))]
    committed = tensors_of(averaged.committed, "model.")
    assert committed.keys() == course[-1].keys()
    for name, tensor in committed.items():
        by_hand = sum(s * each[name].double() for s, each in zip(shares, course, strict=True))
        torch.testing.assert_close(tensor.double(), by_hand, rtol=0, atol=1e-6)
        assert not torch.equal(tensor, course[-1][name])
    # It ends there: what comes behind has the optimizer of the last step, and begins another.
    last = averaged.checkpoints.load(NUM_STEPS).path
    assert tensors_of(averaged.committed, "optimizer.ema.") == {}
    assert read_scalars(averaged.committed).num_averaged is None
    assert read_scalars(last).num_averaged == NUM_STEPS
    for name, moment in tensors_of(averaged.committed, "optimizer.exp_avg.").items():
        assert torch.equal(moment, tensors_of(last, "optimizer.exp_avg.")[name])
    assert plain.committed == plain.checkpoints.load(NUM_STEPS).path


def test_the_average_of_a_killed_attempt_goes_on_bit_for_bit(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    ema = EmaConfig(decay=0.9)
    unbroken = train(tmp_path / "unbroken", ema=ema)
    train(tmp_path / "killed", ema=ema, num_steps=2)
    resumed = train(tmp_path / "killed", ema=ema)
    again = train(tmp_path / "killed", ema=ema)  # it ended before: nothing but its average is left
    for attempt in (resumed, again):
        for name, tensor in tensors_of(unbroken.committed, "").items():
            assert torch.equal(tensor, tensors_of(attempt.committed, "")[name])


def test_a_spoiled_update_is_left_out_named_and_limited(
    train: Callable[..., Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose loss mask is infinite for one row: the next step starts where this one did."""
    whole = SupervisedTrainer.batch

    def spoiled(stage: SupervisedTrainer, step: LoopStep) -> TokenBatch:
        batch = whole(stage, step)
        mask_T = batch.columns["loss_mask"].clone()
        mask_T[batch.cu_seqlens[1] - 1] = torch.inf if step.number == 2 else 1.0
        return batch.with_columns(loss_mask=mask_T)

    monkeypatch.setattr(SupervisedTrainer, "batch", spoiled)
    monkeypatch.setattr(
        ModelWorker, "train", poisoned_where_the_mask_is_infinite(ModelWorker.train)
    )
    attempt = train(tmp_path / "work", num_steps=3)
    assert sorted(attempt.losses) == [1, 3]
    told = (tmp_path / "work" / "journal.jsonl").read_text()
    assert "policy: loss is nan; the update is left out; spoiled by row " in told
    assert " of data.sft (loss_mask)" in told
    values = attempt.checkpoints.load(3).state.values
    assert values["num_poisoned"] == 1


def poisoned_where_the_mask_is_infinite(train: Callable[..., Any]) -> Callable[..., Any]:
    def spoiled(worker: ModelWorker, batch: TokenBatch, *args: Any) -> Any:
        if torch.isinf(batch.columns["loss_mask"]).any():
            return PoisonedUpdate("loss is nan")
        return train(worker, batch, *args)

    vars(spoiled).update(vars(train))
    return spoiled
