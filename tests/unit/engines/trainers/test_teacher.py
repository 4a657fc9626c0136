"""A teacher on the training ranks and one in engines of its own say the same of the same tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines.algorithms.distillation import SAMPLED_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS
from engines.checkpoint.model_directory import load_tokenizer
from engines.config.algorithm import DistillationConfig
from engines.config.rollout import RolloutConfig
from engines.config.sections import RLConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_engines
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import FrozenModel, replica_beside
from engines.controller.worker_group import InProcessGroup
from engines.errors import RolloutError
from engines.jobs.rl_round import asked_teacher
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.trainers.teacher import RankTeacher, ServedTeacher, Teacher
from engines.training.spec import TEACHER, ModelSource, RoleSpec
from engines.types import TokenBatch

VOCAB_SIZE, NUM_FURTHER_ROWS, NUM_TOP = 20, 12, 6
TEMPERATURE = 0.7
BATCH = TokenBatch.from_sequences(
    [[4, 5, 6, 7, 8, 9], [10, 11, 12], [4, 5, 13, 14, 15, 16, 17, 4], [9, 8, 7]],
    # An answer; nothing; turns of somebody else between two answers; all that can be.
    loss_mask=[[0, 0, 1, 1, 1, 1], [0, 0, 0], [0, 0, 1, 1, 0, 0, 1, 0], [0, 1, 1]],
)
NOT_TAUGHT = BATCH.columns["loss_mask"] == 0


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model_dir(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: Any) -> Path:
    """A teacher with rows for tokens that its students have not, and which it likes."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    load_tokenizer(tiny_model).save_pretrained(path)
    config = AutoConfig.for_model(
        request.param, vocab_size=VOCAB_SIZE + NUM_FURTHER_ROWS, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=32, initializer_range=0.3,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def served(model_dir: Path, tmp_path: Path, request: Any) -> Callable[..., ServedTeacher]:
    def teacher(rl: RLConfig, **rollout: Any) -> ServedTeacher:
        like = ReplicaSpec(model_dir, RolloutConfig(**rollout), "float32", "cpu", None, 1, tmp_path)
        model = FrozenModel(replica_beside(like, model_dir, 1, {}, embedded=True), model_dir)
        scope = asked_teacher(rl, model, launch_engines(model.replica), VOCAB_SIZE)
        request.addfinalizer(lambda: scope.__exit__(None, None, None))
        return scope.__enter__()

    return teacher


@pytest.fixture
def held(model_dir: Path, request: Any) -> Callable[[DistillationConfig], Teacher]:
    def teacher(config: DistillationConfig) -> Teacher:
        role = RoleSpec(ModelSource(model_dir), TrainingConfig())
        spec = WorkerSpec({TEACHER: role}, model_dir, None, TEMPERATURE, "cpu", 0)
        worker = ModelWorker(spec)
        worker.initialize()
        request.addfinalizer(worker.close)
        return RankTeacher(config, InProcessGroup(worker).run, VOCAB_SIZE)

    return teacher


def rl_with(model_dir: Path, **distillation: Any) -> RLConfig:
    given = {"path": str(model_dir), "num_top": NUM_TOP, "served": {}, **distillation}
    return RLConfig.model_validate(
        {"distillation": given, "sampling": {"temperature": TEMPERATURE}}
    )


@torch.no_grad()
def plain_logprobs(model_dir: Path) -> Tensor:
    """(T, V) of every place, each sequence alone; the first of each means nothing."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = []
    for ids in BATCH.input_ids_T.split(BATCH.lengths_B.tolist()):
        logits = model(ids[None]).logits[0].double() / TEMPERATURE
        rows.append(logits.log_softmax(-1).roll(1, 0))
    return torch.cat(rows)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=1e-5)


def test_served_top_k_tokens_match_the_ranks_and_a_plain_pass(
    model_dir: Path, served: Callable[..., ServedTeacher], held: Callable[..., Teacher]
) -> None:
    rl = rl_with(model_dir)
    assert rl.distillation is not None
    ours, theirs = served(rl).columns(BATCH), held(rl.distillation).columns(BATCH)
    assert ours.keys() == theirs.keys() == {TOPK_IDS, TOPK_LOGPROBS}
    close(ours[TOPK_LOGPROBS], theirs[TOPK_LOGPROBS])
    assert torch.equal(ours[TOPK_IDS], theirs[TOPK_IDS])
    assert {each.dtype for each in ours.values()} == {torch.int64, torch.float32}
    plain = plain_logprobs(model_dir)
    # Its own favourites are among the rows that nobody else has.
    assert (plain.argmax(-1) >= VOCAB_SIZE).any()
    best = plain[:, :VOCAB_SIZE].topk(NUM_TOP, dim=1)
    close(ours[TOPK_LOGPROBS], best.values.masked_fill(NOT_TAUGHT[:, None], 0.0))
    assert torch.equal(ours[TOPK_IDS], best.indices.masked_fill(NOT_TAUGHT[:, None], 0))


def test_the_sampled_tokens_logprobs_are_too(
    model_dir: Path, served: Callable[..., ServedTeacher], held: Callable[..., Teacher]
) -> None:
    rl = rl_with(model_dir, loss="k2")
    assert rl.distillation is not None
    ours, theirs = served(rl).columns(BATCH), held(rl.distillation).columns(BATCH)
    assert ours.keys() == theirs.keys() == {SAMPLED_LOGPROBS}
    close(ours[SAMPLED_LOGPROBS], theirs[SAMPLED_LOGPROBS])
    plain = plain_logprobs(model_dir).gather(1, BATCH.input_ids_T[:, None]).squeeze(1)
    close(ours[SAMPLED_LOGPROBS], plain.masked_fill(NOT_TAUGHT, 0.0))


def test_only_what_is_taught_is_asked_about() -> None:
    asked: list[PromptRequest] = []

    def ask(requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        asked.extend(requests)
        return [
            PromptLogprobs(each.request_id, torch.full((len(each.token_ids) - each.first,), -2.0))
            for each in requests
        ]

    config = DistillationConfig.model_validate({"path": "teacher", "loss": "k3+"})
    found = ServedTeacher(config, ask, TEMPERATURE, VOCAB_SIZE).columns(BATCH)[SAMPLED_LOGPROBS]
    assert [(each.token_ids, each.first) for each in asked] == [
        ((4, 5, 6, 7, 8, 9), 2),
        ((4, 5, 13, 14, 15, 16, 17), 2),
        ((9, 8, 7), 1),
    ]
    assert len({each.request_id for each in asked}) == 3
    assert torch.equal(found != 0, ~NOT_TAUGHT)


def test_teacher_engine_refusal_is_raised_before_sampling(
    model_dir: Path, served: Callable[..., ServedTeacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RolloutError("a model cannot return logprobs of a prompt")

    monkeypatch.setattr("engines.rollout.transformers.running_batch.targets_of", refuse)
    with pytest.raises(RolloutError, match="cannot return logprobs of a prompt"):
        served(rl_with(model_dir))
