"""Model directories: made bitwise by seed, and refused in one line when they cannot be used."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.model_directory import (
    check_model_directory,
    create_random_model,
    load_tokenizer,
    resolve_model,
    stored_tensor_names,
)
from engines.config.model import ArchitectureConfig, ModelConfig
from infra.errors import ConfigError

SHAPE = ArchitectureConfig(hidden_size=32, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)
    return path


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer_dir: Path) -> Path:
    create_random_model(SHAPE, tokenizer_dir, 64, 3, tmp_path / "model")
    return tmp_path / "model"


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_directory(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))


def test_equal_seeds_give_equal_bytes(tokenizer_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        create_random_model(SHAPE, tokenizer_dir, 64, seed, tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is not touched"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ac"]
    assert not torch.equal(*(w["model.embed_tokens.weight"] for w in weights))


def test_what_is_made_loads_and_passes_the_check(model_dir: Path) -> None:
    check_model_directory(model_dir, max_length=64)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 5
    assert model.config.max_position_embeddings == 64
    assert model.generation_config.eos_token_id == 1
    assert load_tokenizer(model_dir).encode("a c") == [2, 4]
    assert load_tokenizer(model_dir, "{{ messages }}").chat_template == "{{ messages }}"
    assert resolve_model(ModelConfig(path=str(model_dir)), 64) == model_dir


def test_an_unknown_architecture(tokenizer_dir: Path, tmp_path: Path) -> None:
    shape = ArchitectureConfig(model_type="qwen99")
    with pytest.raises(ConfigError, match=r"^model.architecture: got model_type 'qwen99'"):
        create_random_model(shape, tokenizer_dir, 64, 0, tmp_path / "m")


def test_no_config_lists_what_is_there(model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "step_20").mkdir(parents=True)
    (run / "step_10").mkdir()
    model_dir.rename(run / "step_20" / "hf")
    assert refused(run) == (
        f"model.path: {run} is not a model directory: no config.json; it holds: step_10, step_20 "
        f"(a run? pass {run}/step_20/hf)"
    )
    assert "nowhere is no directory (cwd is " in refused(tmp_path / "nowhere")


def test_an_index_that_names_an_absent_shard(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    shard = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": shard}}))
    assert refused(model_dir) == (
        f"model.path: {index} names {shard}, which is absent; copy it there"
    )
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert "outside of" in refused(model_dir)


def test_pickles_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    text = refused(model_dir)
    assert text.startswith(f"model.path: {model_dir} holds only pytorch_model.bin (pickle can run")
    (model_dir / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused(model_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_its_own_is_refused(model_dir: Path, name: str) -> None:
    edit(model_dir / name, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    assert f"{name} asks for code of its own (auto_map); refused" in refused(model_dir)


@pytest.mark.parametrize("inside", [False, True])
def test_quantized_weights_are_refused_by_their_config(model_dir: Path, inside: bool) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    edit(model_dir / "config.json", **({"text_config": quantized} if inside else quantized))
    text = refused(model_dir)
    assert text.startswith(f"model.path: {model_dir} holds quantized weights (fp8); need ")
    assert text.endswith("; give the unquantized weights of this model")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_one_byte_are_refused(model_dir: Path, dtype: torch.dtype) -> None:
    weights = load_file(model_dir / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, model_dir / "model.safetensors")
    assert re.match(
        rf"model\.path: {model_dir}: {name} is F8_\w+; need .*; give the unquantized weights",
        refused(model_dir),
    )


def test_a_context_too_small(model_dir: Path) -> None:
    assert refused(model_dir, max_length=65) == (
        f"model.max_length: got 65; need at most 64, the context of {model_dir}; lower it"
    )


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_a_context_in_which_rotary_factors_change(model_dir: Path, section: str) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    edit(model_dir / "config.json", **{"rope_parameters": None, section: rope})
    check_model_directory(model_dir, max_length=32)
    assert refused(model_dir, max_length=33).endswith(
        "more than 32 tokens; got model.max_length 33; set it to 32 or less"
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[:-7], "header says"),
        (lambda data: data + b"x", "header says"),
        (lambda data: b"abc", "is not a safetensors file"),
        (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "is not a safetensors file"),
        (lambda data: data[:8] + b"#" + data[9:], "damaged header"),
    ],
)
def test_bad_input_row_30_a_damaged_shard(model_dir: Path, damage: Any, text: str) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert text in refused(model_dir)


def test_other_damage(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / "away")
    assert "has no tokenizer" in refused(model_dir)
    (model_dir / "config.json").write_text("[1]")
    assert "holds a list; need an object" in refused(model_dir)
    (model_dir / "config.json").write_text("{")
    assert "is not JSON" in refused(model_dir)


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "c" * 40
    for path, revision, text in (
        (str(tmp_path / "no"), None, "no path of that name exists here"),
        ("nobody-at-all/no-such-model", None, "need the commit of nobody-at-all/no-such-model"),
        ("nobody-at-all/no-such-model", "main", "got 'main'; need the commit"),
        ("a b/c", commit, "neither the hub nor its cache gives it"),
        ("nobody-at-all/no-such-model", commit, "neither the hub nor its cache gives it"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_model(ModelConfig(path=path, revision=revision), 8)
        assert text in str(caught.value)


def test_the_check_costs_no_torch(model_dir: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from engines.checkpoint.model_directory import check_model_directory\n"
        "check_model_directory(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(model_dir)], timeout=60, check=True)


def test_names_on_disk_and_in_memory(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    names = [name for name, _ in named_state(model)]
    assert "lm_head.weight" not in names, "tied to the embedding, so it comes once"
    assert HubNames(model).identical
    assert stored_tensor_names(model_dir) == sorted(names)
    save_file({"x": torch.zeros(1)}, model_dir / "extra.safetensors")
    assert "x" in stored_tensor_names(model_dir)
