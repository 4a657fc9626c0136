"""Weights on disk that the architecture does not have: refused, however the model is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.config.training import TrainingConfig
from engines.training.backends.transformers.build import build_model, check_stored_names
from engines.training.spec import EngineSpec, ModelType
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

SCALE = "model.layers.0.self_attn.q_proj.weight_scale_inv"
LAYOUTS = {"whole": None, "slices": lambda model: None}


def with_weights(source: Path, path: Path, *names: str) -> Path:
    shutil.copytree(source, path)
    weights = load_file(path / "model.safetensors")
    weights |= {name: torch.ones(1, 1) for name in names}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def build(hf_dir: Path, shard: Any, model_type: ModelType = "language_model") -> Any:
    spec = EngineSpec(hf_dir, TrainingConfig(), None, 1, CPUPlatform(), 0, model_type=model_type)
    return build_model(spec, shard, load_weights=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_scale_beside_a_weight_is_refused(
    layout: str, model_type: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    source = make_model(model_type, **(mixture if model_type == "qwen3_moe" else {}))
    hf_dir = with_weights(source, tmp_path / "scaled", SCALE)
    with pytest.raises(ConfigError, match=rf"^model\.path: .*'unexpected': \['{SCALE}'\]"):
        build(hf_dir, LAYOUTS[layout])
    with pytest.raises(ConfigError, match="unexpected"):
        check_stored_names(hf_dir, "language_model")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_that_say_nothing_new_are_taken(layout: str, qwen3_dir: Path, tmp_path: Path) -> None:
    """The head of a tied model, and buffers that earlier releases wrote for each layer."""
    left_over = "model.layers.0.self_attn.rotary_emb.inv_freq"
    hf_dir = with_weights(qwen3_dir, tmp_path / "old", left_over)
    weights = load_file(hf_dir / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, hf_dir / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(build(hf_dir, LAYOUTS[layout]).named_parameters())
    assert torch.equal(loaded["model.embed_tokens.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_model_leaves_the_head_of_the_language_model(
    layout: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    hf_dir = make_model("qwen3", tie_word_embeddings=False)
    assert not build(hf_dir, LAYOUTS[layout], "value_model").score.weight.any()
    scaled = with_weights(hf_dir, tmp_path / "scaled", SCALE)
    with pytest.raises(ConfigError, match="unexpected"):
        build(scaled, LAYOUTS[layout], "value_model")
