"""Images in the data: whoever of a recipe does not see them is refused by name, before it runs."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow
from vision_cases import write_chat_model

from engines.config.algorithm import DistillationConfig
from engines.config.data import DataConfig, SourceConfig
from engines.config.model import ModelConfig, TokenizerConfig
from engines.config.training import TrainingConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.preflight.run import check_request, first_rows
from engines.vision.sizes import PROCESSOR_FILES
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError

HUB = "Qwen/Qwen2.5-VL-3B-Instruct"
SHOWN = "data.rl.0 has rows that show images"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    buffer = io.BytesIO()
    Pillow.new("RGB", (4, 4)).save(buffer, "PNG")
    row = {"images": [{"bytes": buffer.getvalue(), "path": None}], "problem": "<image>x?"}
    pq.write_table(pa.Table.from_pylist([{**row, "answer": "3"}]), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def look_at(model: Path | str | None, data: Path | str, *changes: str, **asked: Any) -> None:
    base = [
        "data.arithmetic=null",
        f"data.rl=[{{path: {data}}}]",
        f"data.evaluation=[{{path: {data}}}]",
        "sft=null",
    ]
    if model is not None:
        base += ["model.init=pretrained", f"model.path={model}"]
    of_recipe = request_of(load_recipe("quickstart", [*base, *changes]))
    assert of_recipe is not None
    check_request(of_recipe.model_copy(update=asked))


def error_of(*arguments: Any, **asked: Any) -> str:
    with pytest.raises(ConfigError) as error:
        look_at(*arguments, **asked)
    return str(error.value)


def test_who_sees_passes(model: Path, data: Path) -> None:
    look_at(model, data)


def test_the_rollout_engine(model: Path, data: Path) -> None:
    assert error_of(model, data, rollout_engine="vllm") == (
        f"rollout.engine: got vllm; {SHOWN}, which it does not pass to the model; need "
        "transformers; choose it, or leave out the source"
    )


def test_the_backend_and_its_layout(data: Path) -> None:
    """Of a model on the hub: what sees is not known yet, so its backend is asked by name."""
    megatron = TrainingConfig(backend="megatron")
    assert error_of(HUB, data, training=megatron) == (
        f"training.backend: got megatron; {SHOWN}, and it trains only text models; need fsdp or "
        "fsdp2; choose one, or leave out the source"
    )
    changes = ("training.ulysses_size=2", "training.num_workers=2")
    assert error_of(HUB, data, *changes) == (
        f"training.ulysses_size: got 2; {SHOWN}, which Ulysses cannot cut; need 1; set it to 1"
    )


def test_a_critic_and_a_model_that_judges(model: Path, data: Path) -> None:
    critic = ("rl.algorithm.adv_estimator=gae", "rl.critic={}")
    assert error_of(model, data, *critic).startswith(f"rl.critic: got a critic; {SHOWN}, which a v")
    judge = (f"rl.reward.judge={{path: {model}, prompt: '{{{{ answer }}}}'}}",)
    judged = error_of(model, data, *judge, "rl.reward.function=judge")
    assert judged.startswith(f"rl.reward.judge: got a model that judges; {SHOWN}, which it does")


def test_self_play(tmp_path: Path, model: Path, data: Path) -> None:
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    text = tmp_path / "sft.jsonl"
    text.write_text(json.dumps({"messages": turns}), encoding="utf-8")
    play = (
        "preference={self_play: {source: SOURCE, num_samples: 2}}",
        "sft={}",
        f"data.sft=[{{path: {text}}}]",
    )
    best_worst = [each.replace("SOURCE", "best_worst") for each in play]
    assert error_of(model, data, *best_worst) == (
        f"preference.self_play.source: got best_worst, which asks about rows of data.rl; {SHOWN}, "
        "which pairs do not hold; need rows of text; set it to spin, or leave out the source"
    )
    look_at(model, data, *(each.replace("SOURCE", "spin") for each in play))


def test_a_suite_of_its_own_judges(tmp_path: Path, model: Path, data: Path) -> None:
    """By functions alone, which are told of no prompt; without a reward the recipe's judges."""
    text = tmp_path / "t.jsonl"
    row = {"prompt": "1+1", "reward_model": {"ground_truth": "2"}}
    text.write_text(json.dumps(row), encoding="utf-8")
    changes = (
        f"rl.reward={{function: judge, judge: {{path: {model}, max_length: 64, "
        "sampling: {max_new_tokens: 8}, prompt: '{{ answer }}'}}",
        f"suites={{shown: {{data: {{evaluation: [{{path: {data}}}]}}, REWARD}}}}",
    )
    own = [each.replace("REWARD", "reward: {function: exact}") for each in changes]
    look_at(model, text, *own)
    recipes = [each.replace(", REWARD", "") for each in changes]
    assert error_of(model, text, *recipes) == (
        "rl.reward.judge: got a model that judges; suites.shown.data.evaluation.0 has rows that "
        "show images, which it does not see; need a rule; set rl.reward.function to one, or leave "
        "out the source"
    )


def test_a_teacher(tmp_path: Path, model: Path, data: Path) -> None:
    served = DistillationConfig.model_validate({"path": str(model), "served": {}})
    assert error_of(model, data, teacher=served) == (
        f"rl.distillation.served: {SHOWN}, which served teachers cannot see; need a teacher on the "
        "training ranks; set this to null, or leave out the source"
    )
    shutil.copytree(model, tmp_path / "blind")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "vision_config": None})
    (tmp_path / "blind" / "config.json").write_text(text, encoding="utf-8")
    blind = DistillationConfig(path=str(tmp_path / "blind"))
    assert error_of(model, data, teacher=blind) == (
        f"rl.distillation.path: got {blind.path}; {SHOWN}, which it does not see; need a teacher "
        "that sees (qwen2_vl, qwen2_5_vl, qwen3_vl); choose one, or leave out the source"
    )
    look_at(model, data, teacher=DistillationConfig(path=str(model), num_top=4))
    text_rows = tmp_path / "t.jsonl"
    text_rows.write_text(json.dumps({"prompt": "1+1", "answer": "2"}), encoding="utf-8")
    look_at(
        model,
        data,
        f"data.rl=[{{path: {text_rows}}}]",
        teacher=served.model_copy(update={"num_top": 4}),
    )


def test_a_model_that_it_is_compared_with(tmp_path: Path, model: Path, data: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    against = ModelConfig(path=str(other))
    look_at(model, data, against=against)
    for name in PROCESSOR_FILES:
        (other / name).unlink(missing_ok=True)
    refused = error_of(model, data, against=against)
    assert refused.startswith(f"against.path: got {other}; data.evaluation.0 has rows that show im")


def test_a_processor_that_says_no_size(model: Path, data: Path) -> None:
    for name in PROCESSOR_FILES:
        (model / name).unlink(missing_ok=True)
    (model / PROCESSOR_FILES[0]).write_text('{"size": {"height": 4, "width": 4}}')
    assert error_of(model, data).startswith(
        f"model.path: {model}: its image processor has min_pixels None; need a whole number from 1"
    )


def test_the_model(tmp_path: Path, model: Path, data: Path) -> None:
    for name in PROCESSOR_FILES:
        (model / name).unlink(missing_ok=True)
    assert error_of(model, data) == (
        f"model.path: got {model}; {SHOWN}, and it has no configuration of an image "
        "processor; need preprocessor_config.json or processor_config.json that holds one; copy it "
        "beside the weights"
    )
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for changes, what in (
        ({"model_type": "gemma3"}, "a gemma3"),
        ({"vision_config": None}, "a text model"),
    ):
        path.write_text(json.dumps({**config, **changes}), encoding="utf-8")
        assert error_of(model, data, trains=False) == (
            f"model.path: got {model}, {what}; {SHOWN}; need a model that sees (qwen2_vl, "
            "qwen2_5_vl, qwen3_vl); choose one, or leave out the source"
        )


def test_a_model_made_from_scratch(data: Path) -> None:
    refused = error_of(None, data)
    assert refused.startswith(f"model.init: got random; {SHOWN}; need a model that sees (qwen2_vl")


def test_rows_on_the_hub_are_known_by_their_layout(model: Path) -> None:
    hub = "[{path: hiyouga/geometry3k, format: geometry3k}]"
    changes = (f"data.rl={hub}", f"data.evaluation={hub}")
    refused = error_of(model, "hiyouga/geometry3k", *changes, rollout_engine="vllm")
    assert refused.startswith(f"rollout.engine: got vllm; {SHOWN}")


def test_rows_of_text_ask_nobody(tmp_path: Path) -> None:
    row = {"prompt": "1+1", "answer": "2"}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    look_at(None, path)


def test_the_template_writes_the_first_row_of_every_split(tmp_path: Path) -> None:
    """Tools that the template leaves out are found before anything is tokenized."""
    train_tokenizer(TokenizerConfig(), ["abc"], tmp_path / "tokenizer", max_length=64)
    tokenizer = DirectoryTokenizer.load(tmp_path / "tokenizer")
    tool = {"name": "f", "parameters": {}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {
        "sft": {"messages": turns, "tools": [tool]},
        "preference": {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [tool]},
        "rl": {"prompt": "a", "reward_model": {"ground_truth": "b"}, "tools": [tool]},
    }
    for split, row in rows.items():
        path = tmp_path / f"{split}.jsonl"
        path.write_text(json.dumps(row), encoding="utf-8")
        data = DataConfig.model_validate({split: (SourceConfig(path=str(path)),)})
        first_rows(data, "data", None)
        with pytest.raises(ConfigError, match=r"model\.chat_template: leaves out the tools that"):
            first_rows(data, "data", tokenizer)
