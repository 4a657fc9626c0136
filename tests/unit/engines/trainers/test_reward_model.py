"""Scores of the role `reward` are those of transformers' sequence classification."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from engines.checkpoint.model_directory import check_reward_model, load_tokenizer
from engines.config.algorithm import RewardConfig
from engines.config.model import RewardModelConfig, TokenizerConfig
from engines.config.training import TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.worker_group import InProcessGroup
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.preflight.models import look_at_judging
from engines.jobs.serving.frozen_models import asked_judges
from engines.judges.asking import Judges, RewardModelJudge
from engines.rewards.scorer import RewardScorer
from engines.trainers.scoring import CompletionScorer
from engines.training.spec import REWARD, ModelSource, RoleSpec
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch
from infra.errors import ConfigError

PROMPTS = [(Message("user", text),) for text in ("12+34=", "1+1=", "9+99=")]
ANSWERS = ["46", "3", "108"]
MAX_LENGTH = 24


def write_reward_model(path: Path, num_labels: int = 1) -> Path:
    """A sequence classification model as `save_pretrained` leaves it."""
    train_tokenizer(TokenizerConfig(), ["0123456789+="], path, max_length=32, chat_template=None)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(load_tokenizer(path)), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64,
        max_position_embeddings=32, num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture
def judge_of(model_dir: Path, request: pytest.FixtureRequest) -> Callable[..., RewardModelJudge]:
    def judge(max_length: int, backend: str = "fsdp2") -> RewardModelJudge:
        role = RoleSpec(
            ModelSource(model_dir), TrainingConfig(backend=backend), model_type="value_model"
        )
        worker = ModelWorker(WorkerSpec({REWARD: role}, model_dir, None, 1.0, "cpu", 0))
        worker.initialize()
        request.addfinalizer(worker.close)
        asked = RewardConfig(
            function="model", model=RewardModelConfig(path=str(model_dir), max_length=max_length)
        )
        with asked_judges(asked, 0, role, InProcessGroup(worker), None, None) as judges:
            assert judges.reward_model is not None
            return judges.reward_model

    return judge


@torch.no_grad()
def transformers_scores(path: Path) -> list[float]:
    """Each conversation alone, as a user of transformers reads such a model."""
    tokenizer = load_tokenizer(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    scores = []
    for [message], answer in zip(PROMPTS, ANSWERS, strict=True):
        conversation = [
            {"role": "user", "content": message.content},
            {"role": "assistant", "content": answer},
        ]
        ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)
        scores.append(model(ids["input_ids"]).logits[0, 0].item())
    return scores


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_scores_are_those_of_transformers(
    judge_of: Callable[..., RewardModelJudge], model_dir: Path, backend: str
) -> None:
    expected = transformers_scores(model_dir)
    assert max(expected) - min(expected) > 0.1
    found = judge_of(MAX_LENGTH, backend).scores(PROMPTS, ANSWERS)
    assert found == pytest.approx(expected, abs=1e-5)


def test_equal_conversations_are_scored_once_and_long_ones_never(model_dir: Path) -> None:
    read: list[TokenBatch] = []

    def lengths(batch: TokenBatch) -> torch.Tensor:
        read.append(batch)
        return batch.cu_seqlens.diff().float()

    judge = RewardModelJudge(lengths, DirectoryTokenizer.load(model_dir), MAX_LENGTH)
    long = "1" * MAX_LENGTH
    found = judge.scores([PROMPTS[0]] * 4, ["46", long, "46", "4"])
    assert found[0] == found[2] == found[3] + 1  # pyright: ignore[reportOptionalOperand]
    assert found[1] is None
    assert read[0].num_sequences == 2
    assert judge.scores([PROMPTS[0]], [long]) == [None]
    assert len(read) == 1


def test_mixture_adds_model_to_rule_and_unscores_a_long_answer(
    judge_of: Callable[..., RewardModelJudge], model_dir: Path
) -> None:
    """12+34= has an answer of 46: 1 of the rule, and a half of what the model says."""
    config = RewardConfig.model_validate(
        {
            "function": "mixture",
            "components": {
                "rule": {"function": "exact"},
                "taste": {"function": "model", "weight": 0.5},
            },
            "accuracy": ["rule"],
            "model": {"path": str(model_dir)},
            "max_unscored_frac": 0.5,
        }
    )
    tokenizer = DirectoryTokenizer.load(model_dir)
    row = RLRow("s", PROMPTS[0], "", RewardModel("rule", "46"))
    texts = ["46", "1" * MAX_LENGTH]
    completions = [completion(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    request = RolloutRequest("p", (4,), SamplingParams(MAX_LENGTH), (1, 2))
    with RewardScorer(config) as rewards:
        scorer = CompletionScorer(rewards, tokenizer, judges=Judges(judge_of(MAX_LENGTH)))
        [[score, unscored]] = scorer.judge([row], [completions], [request])
    assert score is not None
    [taste, *_] = transformers_scores(model_dir)
    assert score.value == pytest.approx(1 + 0.5 * taste, abs=1e-5)
    assert score.extras["taste"] == pytest.approx(taste, abs=1e-5)
    assert score.extras["acc"] == 1.0
    assert unscored is None


def completion(ids: list[int]) -> Completion:
    zeros = (0,) * len(ids)
    return Completion("p", 0, tuple(ids), zeros, zeros, "stop")


def test_a_model_without_one_score_is_refused_by_its_field(model_dir: Path, tmp_path: Path) -> None:
    two = write_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"model.path: .* score.weight of shape \[2, 32\]"):
        check_reward_model(two, max_length=8)
    look = partial(look_at_judging, "rl.reward.model", check_reward_model, row=None)
    with pytest.raises(ConfigError, match=r"^rl.reward.model.path: .*need a head of one output"):
        look(RewardModelConfig(path=str(two), max_length=8))
    with pytest.raises(ConfigError, match=r"^rl.reward.model.max_length: got 64; need at most 32"):
        look(RewardModelConfig(path=str(model_dir), max_length=64))
    look(RewardModelConfig(path=str(model_dir), max_length=32))
