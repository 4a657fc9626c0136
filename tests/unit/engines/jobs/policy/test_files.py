"""The files of a policy: what is copied, and where answers end."""

import json
from pathlib import Path

import pytest

from engines.config.model import ModelConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.tokenizer import TOOL_TEMPLATE, DirectoryTokenizer
from engines.jobs.process.policy import (
    initial_source,
    trained_steps,
    write_hf_files,
    write_policy,
)
from engines.trainers.trained_steps import TrainedSteps
from infra.errors import ConfigError

TURNS_WITHOUT_END = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = train_tokenizer(
        TokenizerConfig(), ["0123"], tmp_path / "model", max_length=32, chat_template=None
    )
    (directory / "config.json").write_text('{"eos_token_id": 99}', encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "notes.json").write_text("{}", encoding="utf-8")
    return directory


def test_configuration_and_tokenizer_are_copied_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "stale").touch()
    write_hf_files(source, tmp_path / "hf", None)
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= names
    assert not names & {"model.safetensors", "notes.json", "stale"}


def test_what_images_and_tools_need_comes_along(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    for name in (TOOL_TEMPLATE, "preprocessor_config.json", "processor_config.json"):
        (source / name).write_text("{}", encoding="utf-8")
    write_hf_files(source, tmp_path / "hf", None)
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()
    assert (tmp_path / "hf" / "processor_config.json").exists()
    assert (tmp_path / "hf" / TOOL_TEMPLATE).exists()
    # A template of the recipe's is the only one.
    template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    write_hf_files(source, tmp_path / "hf", template)
    assert not (tmp_path / "hf" / TOOL_TEMPLATE).exists()


@pytest.mark.parametrize(
    ("known", "rest"), [(None, [99]), (7, [7]), ([7, 8], [7, 8])], ids=["config", "one", "list"]
)
def test_the_token_that_ends_a_turn_becomes_an_end_token(
    source: Path, tmp_path: Path, known: int | list[int] | None, rest: list[int]
) -> None:
    """A base model's own end token is not the one its chat template writes."""
    if known is not None:
        (source / "generation_config.json").write_text(
            json.dumps({"eos_token_id": known, "do_sample": True}), encoding="utf-8"
        )
    write_hf_files(source, tmp_path / "hf", None)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    turn_end = DirectoryTokenizer.load(source).eos_token_id
    assert generation["eos_token_id"] == [*rest, turn_end]
    assert generation.get("do_sample") is (True if known is not None else None)


def test_another_chat_template_travels_with_the_policy(source: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_hf_files(source, tmp_path / "hf", template)
    assert DirectoryTokenizer.load(tmp_path / "hf").chat_template == template


def test_a_policy_links_its_checkpoint_and_says_who_made_it(source: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step" / "tensors"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard").write_bytes(b"x" * 10)
    output = tmp_path / "output"
    output.mkdir()
    write_hf_files(source, tmp_path / "hf", None)
    steps = TrainedSteps(stage="rl_round", num_steps=40, num_skipped=3, kl_coef=0.5)
    write_policy(output, checkpoint.parent, tmp_path / "hf", steps)
    assert (output / "checkpoint/tensors/shard").samefile(checkpoint / "shard")
    assert (output / "hf/config.json").exists()
    assert trained_steps(output) == steps


def test_a_model_from_scratch_needs_a_dataset_with_a_tokenizer(tmp_path: Path) -> None:
    for name in ("sft.parquet", "rl.parquet", "eval.parquet", "summary.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="need a dataset that was made with model.init: random"):
        initial_source(ModelConfig(init="random"), None, tmp_path, 0, tmp_path)


def test_a_pretrained_model_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model directory: no config.json"):
        initial_source(ModelConfig(path=str(tmp_path)), tmp_path, tmp_path, 0, tmp_path)


def test_a_model_without_an_end_of_answers_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}", encoding="utf-8")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("eos_token", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path: .*names no token that ends an answer"):
        write_hf_files(source, tmp_path / "hf", TURNS_WITHOUT_END)
