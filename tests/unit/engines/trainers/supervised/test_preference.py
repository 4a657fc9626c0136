"""Preferences on a real tiny model: what the stage learns, measures, and repeats after a kill."""

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.algorithms.preference.answers import PairLoss, Pairs, pairs_of
from engines.algorithms.preference.options import RewardModelOptions
from engines.checkpoint.step_store import StepCheckpoints
from engines.config.sections import PreferenceConfig, RewardTrainingConfig
from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_group
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.data.read.chat import RenderedConversation
from engines.data.read.examples import Pair, as_policy, as_reward_model, read_pairs
from engines.data.read.rows import Message, PreferenceRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.trainers.progress import StageProgress
from engines.trainers.step_timer import PhaseClock
from engines.trainers.supervised.preference import (
    PolicyPairs,
    RewardPairs,
    longest_exchanged,
    measured,
    packed,
)
from engines.trainers.supervised.trainer import SupervisedTrainer, Trained
from engines.training.spec import POLICY, REFERENCE, ModelSource, RoleName, RoleSpec
from engines.types import TokenBatch
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal, read_records

NUM_STEPS = 8
LOSSES = ("sigmoid", "ipo", "simpo", "orpo", "kto")


def rows(first: int, last: int) -> list[PreferenceRow]:
    """The chosen answer ends in an even digit, the rejected one in an odd one."""
    draw = random.Random(first)
    return [
        PreferenceRow(
            (Message("user", f"{i}+{i}="),),
            f"{draw.randrange(10)}{2 * draw.randrange(5)}",
            f"{draw.randrange(10)}{2 * draw.randrange(5) + 1}",
        )
        for i in range(first, last)
    ]


@dataclass(frozen=True)
class Attempt:
    """What one attempt did and left behind."""

    trained: Trained
    metrics: dict[int, dict[str, float]]
    weights: Path


@pytest.fixture
def pairs(tiny_model: Path) -> Callable[[int, int], tuple[Pair, ...]]:
    tokenizer = DirectoryTokenizer.load(tiny_model)
    return lambda first, last: read_pairs(rows(first, last), tokenizer, 32, as_policy)


@pytest.fixture
def train(tiny_model: Path, pairs: Callable[[int, int], tuple[Pair, ...]]) -> Callable[..., Any]:
    def train(
        work: Path,
        loss: str,
        *,
        num_steps: int = NUM_STEPS,
        every: int | None = None,
        target_loss: float | None = None,
        ema: EmaConfig | None = None,
    ) -> Attempt:
        work.mkdir(exist_ok=True)
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, ema=ema)
        config = PreferenceConfig(
            num_steps=num_steps,
            batch_size_pairs=8,
            loss=loss,
            optimizer=optimizer,
            held_out_every_num_steps=every,
            target_loss=target_loss,
        )
        examples = PolicyPairs(config, pairs(0, 24), pairs(24, 56), 32)
        training = TrainingConfig(num_threads=1, max_tokens_per_micro_batch=48)
        source = ModelSource(tiny_model)
        roles: dict[RoleName, RoleSpec] = {
            POLICY: RoleSpec(source, training, optimizer, total_num_steps=NUM_STEPS)
        }
        if examples.needs_reference:
            roles[REFERENCE] = RoleSpec(source, training)
        spec = WorkerSpec(roles, tiny_model, None, 1.0, "cpu", 0)
        checkpoints = StepCheckpoints(work / "checkpoints", 10)
        with (
            closing(launch_policy_group(spec, work)) as workers,
            closing(Journal(work / "journal.jsonl")) as journal,
        ):
            heartbeat = Heartbeat(work / "heartbeat.json", 60.0)
            progress = StageProgress(journal, heartbeat, checkpoints, 100, num_steps, PhaseClock())
            trained = SupervisedTrainer(
                config, examples, 8, workers, progress, 0, "preference"
            ).train()
        records, _ = read_records(work / "journal.jsonl", 0)
        metrics: dict[int, dict[str, float]] = {}
        for record in records:
            if record.kind == "metrics" and record.step is not None:
                metrics.setdefault(record.step, {}).update(record.values)
        return Attempt(trained, metrics, checkpoints.load(trained.num_steps).path)

    return train


@pytest.mark.parametrize("loss", LOSSES)
def test_held_out_pairs_are_told_apart_in_the_end(
    train: Callable[..., Attempt], tmp_path: Path, loss: str
) -> None:
    attempt = train(tmp_path / "work", loss)
    before, after = attempt.trained.before, attempt.trained.after
    if loss in ("sigmoid", "ipo", "kto"):
        assert before["pair_accuracy"] == 0.5, (
            "the policy is its own reference: every pair is a tie"
        )
        assert before["pair_margin"] == 0.0
    assert after["num_pairs"] == 32
    assert after["pair_accuracy_low"] > before["pair_accuracy"]
    assert after["pair_margin"] > before["pair_margin"]
    said = attempt.trained.metrics
    assert said["pair_accuracy"] == after["pair_accuracy"]
    assert said["before/pair_accuracy_low"] == before["pair_accuracy_low"]
    last = attempt.metrics[NUM_STEPS]
    assert last["val-core/pair_accuracy"] == after["pair_accuracy"]
    assert last["preference/accuracy"] > 0.6
    assert attempt.metrics[0]["val-core/pair_accuracy"] == before["pair_accuracy"]


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_killed_attempt_ends_bitwise_equal_to_an_unbroken_one(
    train: Callable[..., Attempt], tmp_path: Path, loss: str
) -> None:
    unbroken = train(tmp_path / "unbroken", loss)
    work = tmp_path / "killed"
    train(work, loss, num_steps=3)
    resumed = train(work, loss)
    assert resumed.trained == unbroken.trained, "what was measured before the first step, too"
    files = sorted(path.relative_to(unbroken.weights) for path in unbroken.weights.rglob("*.*"))
    tensors = [name for name in files if name.suffix == ".distcp" or name.suffix == ".safetensors"]
    assert tensors
    for name in tensors:
        assert (resumed.weights / name).read_bytes() == (unbroken.weights / name).read_bytes()
    for step in range(1, NUM_STEPS + 1):
        first, second = unbroken.metrics[step], resumed.metrics[step]
        assert first["train/loss"] == second["train/loss"]


def test_held_out_pairs_are_looked_at_as_often_as_asked(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    attempt = train(tmp_path / "work", "sigmoid", num_steps=5, every=2)
    looked = [step for step, found in attempt.metrics.items() if "val-core/pair_margin" in found]
    assert looked == [0, 2, 4, 5]


def test_an_early_end_is_looked_at_by_the_weights_that_stay(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    averaged = EmaConfig(decay=0.75, use_warmup=False)
    attempt = train(tmp_path / "work", "simpo", every=1, target_loss=1e6, ema=averaged)
    assert attempt.trained.num_steps == 1
    raw = train(tmp_path / "raw", "simpo", every=1, target_loss=1e6)
    after = attempt.trained.after["pair_margin"]
    assert attempt.metrics[1]["val-core/pair_margin"] == after
    assert raw.metrics[1]["val-core/pair_margin"] != after


def test_only_the_last_answer_is_compared(tiny_model: Path) -> None:
    prompt = (Message("user", "1+1="), Message("assistant", "2"), Message("user", "2+2="))
    tokenizer = DirectoryTokenizer.load(tiny_model)
    [pair] = read_pairs([PreferenceRow(prompt, "4", "55")], tokenizer, 32, as_policy)
    for side, answer in ((pair.chosen, "4"), (pair.rejected, "55")):
        places = zip(side.input_ids, side.loss_mask, strict=True)
        trained = [token for token, on in places if on]
        assert trained == [*tokenizer.encode(answer), tokenizer.eos_token_id]


def test_a_score_stands_behind_the_last_token_alone(tiny_model: Path) -> None:
    [pair] = read_pairs(rows(0, 1), DirectoryTokenizer.load(tiny_model), 32, as_reward_model)
    assert pair.chosen.loss_mask == (*[0] * (len(pair.chosen.input_ids) - 1), 1)


def test_a_row_twice_in_a_batch_is_two_units(
    pairs: Callable[[int, int], tuple[Pair, ...]],
) -> None:
    [pair] = pairs(0, 1)
    batch = packed([pair, pair], [5, 5], paired=True)
    assert batch.unit_B is not None
    assert batch.unit_B.tolist() == [0, 0, 1, 1]
    assert batch.rows["chosen"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert batch.rows["row"].tolist() == [5, 5, 5, 5]
    torch.testing.assert_close(batch.rows["margin"], torch.zeros(4, dtype=torch.float64))


def test_reference_logprobs_come_from_the_initial_weights(
    train: Callable[..., Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    whole = ModelWorker.infer_logprobs

    def told(worker: ModelWorker, batch: Any, role: RoleName = POLICY) -> Any:
        asked.append(role)
        return whole(worker, batch, role)

    vars(told).update(vars(whole))
    monkeypatch.setattr(ModelWorker, "infer_logprobs", told)
    train(tmp_path / "simpo", "simpo", num_steps=1)
    assert asked == []
    train(tmp_path / "sigmoid", "sigmoid", num_steps=1)
    assert set(asked) == {REFERENCE}


def side(prompt: int, answer: int) -> RenderedConversation:
    return RenderedConversation(tuple(range(prompt + answer)), (0,) * prompt + (1,) * answer)


@pytest.mark.parametrize(
    ("loss", "held_out", "expected"),
    [
        ("sigmoid", False, 17),
        ("sigmoid", True, 26),
        ("kto", False, 14),
        ("kto", True, 26),
    ],
)
def test_micro_batch_requirement_is_known_before_model_loads(
    loss: str, held_out: bool, expected: int
) -> None:
    """A pair as one; an answer by itself as the longest prompt with the longest answer."""
    trained_on = [
        Pair(0, side(3, 2), side(3, 9), None, "drawn"),
        Pair(1, side(5, 2), side(5, 3), None, "drawn"),
    ]
    looked_at = [Pair(0, side(9, 4), side(9, 4), None, "drawn")] if held_out else []
    config = PreferenceConfig(num_steps=1, batch_size_pairs=2, loss=loss)
    assert PolicyPairs(config, trained_on, looked_at, 16).largest_unit == expected
    assert longest_exchanged(trained_on, 13) == 13
    config = RewardTrainingConfig(num_steps=1, batch_size_pairs=2)
    options = RewardModelOptions()
    assert RewardPairs(config, options, trained_on, looked_at).largest_unit == (
        26 if held_out else 17
    )


def test_held_out_pairs_that_repeat_narrow_no_interval(pairs) -> None:
    def judged(batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        reward_P = torch.tensor([-1.0, 1.0, 1.0, 1.0])
        return PairLoss(reward_P, reward_P, torch.zeros(4)), pairs_of(batch)

    four = [*pairs(0, 4)]
    once, often = measured(four, 4, judged), measured(four * 30, 4, judged)
    assert (once["pair_accuracy"], often["pair_accuracy"], often["num_pairs"]) == (0.75, 0.75, 120)
    for end in ("low", "high"):
        assert often[f"pair_accuracy_{end}"] == pytest.approx(once[f"pair_accuracy_{end}"])
