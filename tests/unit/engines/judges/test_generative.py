"""A language model is asked about answers: what it is asked, and what becomes of what it writes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.checkpoint.model_directory import create_random_model, load_tokenizer
from engines.checkpoint.tensor_files import stored_tensors
from engines.config.model import ArchitectureConfig, JudgeConfig, TokenizerConfig
from engines.config.rollout import RolloutConfig
from engines.controller.launch import launch_engines
from engines.controller.replica import ReplicaSpec
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.process.policy import write_hf_files
from engines.jobs.serving.frozen_models import question_seed
from engines.judges.asking import GenerativeJudge
from engines.judges.judgement import judge_score, question
from engines.rewards.base import ScoreRequest
from engines.rollout.service import RolloutService
from engines.trainers.prompts import sampling_params
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError

SHAPE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64,
    tie_word_embeddings=False,
)  # fmt: skip
MAX_NEW_TOKENS = 6
PROMPT = (Message("system", "9"), Message("user", "1+2="))
SAMPLES = [ScoreRequest("s", text, "3") for text in ("3", "4", "3", "1" * 40)]
TEMPLATE = "{{ question }}{{ answer }}={{ ground_truth }}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("judge")
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=48, chat_template=None
    )
    create_random_model(SHAPE, tokenizer, 48, 5, root / "model")
    return root / "model"


@pytest.fixture
def service(model_dir: Path, tmp_path: Path) -> Iterator[RolloutService]:
    write_hf_files(model_dir, tmp_path / "served", None)
    spec = ReplicaSpec(tmp_path / "served", RolloutConfig(), "float32", "cpu", None, 1, tmp_path)
    engines = launch_engines(spec)
    service = engines.service()
    service.sync(engines.new_transport, lambda to: to.send(stored_tensors(model_dir)), 0)
    yield service
    service.close()


def judge_of(model_dir: Path, generate, **sampling) -> GenerativeJudge:
    config = JudgeConfig.model_validate(
        {
            "path": str(model_dir),
            "max_length": 48,
            "prompt": TEMPLATE,
            "sampling": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, **sampling},
        }
    )
    tokenizer = DirectoryTokenizer.load(model_dir)
    how = sampling_params(config.sampling)
    return GenerativeJudge(generate, tokenizer, config, how, partial(question_seed, 0))


@torch.no_grad()
def transformers_text(model_dir: Path, text: str) -> str:
    """What the model writes next, token by token, without a cache."""
    tokenizer = load_tokenizer(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    message = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    first = ids.shape[1]
    for _ in range(MAX_NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, first:], skip_special_tokens=True)


def test_judgement_is_the_models_text_for_question_and_answer(
    model_dir: Path, service: RolloutService
) -> None:
    found = judge_of(model_dir, service.generate).judgements([PROMPT] * 4, SAMPLES)
    expected = [transformers_text(model_dir, f"1+2={text}=3") for text in ("3", "4")]
    assert all(expected)
    assert found == [*expected, expected[0], None]
    assert judge_of(model_dir, service.generate).judgements([], []) == []


def test_equal_question_is_asked_once_with_a_text_derived_seed(
    model_dir: Path, service: RolloutService
) -> None:
    asked: list[RolloutRequest] = []

    def generate(requests) -> list[list[Completion]]:
        asked.extend(requests)
        return service.generate(requests)

    judge = judge_of(model_dir, generate, temperature=1.0)
    first = judge.judgements([PROMPT] * 4, SAMPLES)
    assert len(asked) == 2
    # After a restart, in another order, beside others: still the same.
    again = judge.judgements([PROMPT] * 2, [SAMPLES[1], SAMPLES[0]])
    assert again == [first[1], first[0]]
    assert len({request.request_id for request in asked}) == 4
    assert asked[0].seeds == asked[3].seeds != asked[1].seeds


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_a_judgement_without_its_end_is_none(model_dir: Path, reason: str) -> None:
    def generate(requests) -> list[list[Completion]]:
        said = (5, 6), (-1.0, -1.0), (0, 0)
        return [[Completion(each.request_id, 0, *said, reason)] for each in requests]

    assert judge_of(model_dir, generate).judgements([PROMPT], SAMPLES[:1]) == [None]


@pytest.mark.parametrize(
    ("written", "options", "expected"),
    [
        ("7 of 10", {"pattern": r"(\d+) of 10", "scale": 0.1}, (0.7, 1.0)),
        ("at first 3, then -2.5", {}, (-2.5, 0.0)),
        ("score: 1/5", {"pattern": r"(\d)/(\d)", "threshold": 1.0}, (1.0, 0.0)),
    ],
)
def test_the_last_number_is_the_score(written, options, expected) -> None:
    found = judge_score(ScoreRequest("s", "a", "g", judgement=written), **options)
    assert (found["score"], found["acc"]) == pytest.approx(expected)


@pytest.mark.parametrize("written", [None, "no number"])
def test_what_says_no_number_is_unscored(written: str | None) -> None:
    with pytest.raises(ValueError, match="judge"):
        judge_score(ScoreRequest("s", "a", "g", judgement=written))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ answr }}", "'answr' is undefined; need a text of: answer, data_source"),
        ("{{ answer", "need valid Jinja"),
        ("{{ answer.__class__.__mro__ }}", "unsafe"),
        ("a\n{{ extra_info.rubric }}", "line 2: UndefinedError"),
    ],
)
def test_a_text_that_does_not_render_is_refused_by_its_field(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^rl.reward.judge.prompt: ") as caught:
        question(template, PROMPT, SAMPLES[0])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
