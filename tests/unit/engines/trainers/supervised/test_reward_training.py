"""A reward model trained on a real tiny model, and written as one of transformers."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engines.algorithms.preference.options import RewardModelOptions
from engines.checkpoint.model_directory import load_tokenizer
from engines.checkpoint.step_store import StepCheckpoints
from engines.config.sections import RewardTrainingConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_group
from engines.controller.model_worker import ModelWorker, WorkerSpec, role_checkpoint
from engines.data.read.examples import Pair, as_reward_model, read_pairs
from engines.data.read.rows import Message, PreferenceRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import CheckpointError
from engines.jobs.reward_model import BIAS, write_score_config, write_score_model
from engines.trainers.progress import StageProgress
from engines.trainers.step_timer import PhaseClock
from engines.trainers.supervised.preference import RewardPairs, packed
from engines.trainers.supervised.trainer import SupervisedTrainer, Trained
from engines.training.backends.merging import checkpoint_weights
from engines.training.spec import REWARD, ModelSource, RoleSpec
from engines.types import Readouts
from infra.errors import ConfigError
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal

NUM_STEPS = 10


def pairs(model: Path, first: int, last: int) -> tuple[Pair, ...]:
    """The chosen answer ends in an even digit, the rejected one in the odd one beside it."""
    draw = random.Random(first)
    rows = []
    for i in range(first, last):
        start, end = draw.randrange(10), 2 * draw.randrange(5)
        prompt = (Message("user", f"{i}+{i}="),)
        rows.append(PreferenceRow(prompt, f"{start}{end}", f"{start}{end + 1}", margin=0.5))
    return read_pairs(rows, DirectoryTokenizer.load(model), 32, as_reward_model)


class Run:
    """A reward model after its training, with what it says of held-out pairs."""

    def __init__(self, model: Path, work: Path) -> None:
        self.held_out = pairs(model, 40, 72)
        optimizer = OptimizerConfig(lr=1e-2)
        config = RewardTrainingConfig(num_steps=NUM_STEPS, batch_size_pairs=10, optimizer=optimizer)
        training = TrainingConfig(
            num_threads=1, max_tokens_per_micro_batch=64, frozen_parameters=(BIAS,)
        )
        role = RoleSpec(ModelSource(model), training, optimizer, "value_model", False, NUM_STEPS)
        # With a pull to a sum of 0, a bias that is not frozen would move.
        options = RewardModelOptions(center_coef=0.01, margin_coef=1.0)
        training_set = RewardPairs(config, options, pairs(model, 0, 40), self.held_out)
        with (
            closing(
                launch_policy_group(WorkerSpec({REWARD: role}, model, None, 1, "cpu", 0), work)
            ) as workers,
            closing(Journal(work / "journal.jsonl")) as journal,
        ):
            progress = StageProgress(
                journal,
                Heartbeat(work / "heartbeat.json", 60.0),
                StepCheckpoints(work / "checkpoints", 2),
                100,
                NUM_STEPS,
                PhaseClock(),
            )
            self.trained: Trained = SupervisedTrainer(
                config, training_set, 10, workers, progress, 0, "reward_model"
            ).train()
            self.batch = packed(self.held_out, range(len(self.held_out)), paired=True)
            outputs = workers.run(ModelWorker.infer, self.batch, Readouts(last_values=True), REWARD)
            self.scores_B = outputs.last_values_B
        self.checkpoint = role_checkpoint(progress.last_checkpoint(), REWARD)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tiny_model, tmp_path_factory.mktemp("reward-training"))


def test_held_out_pairs_are_told_apart_in_the_end(run: Run) -> None:
    assert run.trained.before["pair_accuracy"] == 0.5, "a head of 0 gives every answer a 0"
    assert run.trained.after["pair_accuracy_low"] > 0.5
    assert run.trained.after["pair_margin"] > 0


def test_exported_reward_model_scores_match_in_transformers(
    run: Run, tiny_model: Path, tmp_path: Path
) -> None:
    last = {side.input_ids[-1] for pair in run.held_out for side in (pair.chosen, pair.rejected)}
    write_score_config(tiny_model, last, tmp_path / "config")
    write_score_model(
        checkpoint_weights(run.checkpoint, tmp_path / "config"),
        tmp_path / "config",
        tmp_path / "model",
        "float32",
        10**9,
    )
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert model.config.num_labels == 1
    sequences = run.batch.input_ids_T.split(run.batch.lengths_B.tolist())
    with torch.no_grad():
        alone = [model(ids[None]).logits.item() for ids in sequences]
        tokenizer = load_tokenizer(tmp_path / "model")
        padded = tokenizer.pad({"input_ids": [ids.tolist() for ids in sequences]},
                               return_tensors="pt")  # fmt: skip
        together = model(**padded).logits.squeeze(1).tolist()
    assert run.scores_B is not None
    assert alone == pytest.approx(run.scores_B.tolist(), abs=1e-5)
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 6) for score in alone}) > 32, "no two answers have one score"


def test_what_pads_and_also_ends_is_no_padding(tiny_model: Path, tmp_path: Path) -> None:
    pads = load_tokenizer(tiny_model).pad_token_id
    write_score_config(tiny_model, {pads}, tmp_path / "config")
    text = (tmp_path / "config/config.json").read_text()
    assert '"pad_token_id": null' in text


def test_a_head_with_a_bias_is_none_of_transformers(tiny_model: Path, tmp_path: Path) -> None:
    write_score_config(tiny_model, set(), tmp_path / "config")
    with pytest.raises(CheckpointError, match=r"score.bias is \[1.0\]; need 0"):
        write_score_model(
            iter([(BIAS, torch.ones(1))]), tmp_path / "config", tmp_path / "out", "float32", 10**9
        )


def test_an_architecture_without_such_a_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "codegen", "vocab_size": 8, "n_embd": 8}')
    with pytest.raises(ConfigError, match="no sequence classification model"):
        write_score_config(other, set(), tmp_path / "config")


def test_a_margin_is_asked_for_alone_where_every_pair_has_one(tiny_model: Path) -> None:
    given = [*pairs(tiny_model, 0, 2)]
    bare = [given[0], replace(given[1], margin=None, data_source="drawn")]
    config = RewardTrainingConfig(num_steps=1, batch_size_pairs=2)
    RewardPairs(config, RewardModelOptions(margin_coef=1.0), given, bare)
    RewardPairs(config, RewardModelOptions(), bare, [])
    with pytest.raises(ConfigError, match="row 1 of data.preference, of drawn, has no margin") as e:
        RewardPairs(config, RewardModelOptions(margin_coef=1.0), bare, given)
    assert e.value.path == "reward_model.options.margin_coef"


def test_a_margin_of_nobody_is_none_and_one_of_zero_is_zero(tiny_model: Path) -> None:
    prompt, tokenizer = (Message("user", "1+1="),), DirectoryTokenizer.load(tiny_model)
    rows = [PreferenceRow(prompt, "2", "3", margin=margin) for margin in (None, 0.0, 0.25)]
    found = read_pairs(rows, tokenizer, 32, as_reward_model)
    assert [pair.margin for pair in found] == [None, 0.0, 0.25]
    batch = packed([*found], range(3), paired=True)
    assert batch.rows["margin"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.25, 0.25]
