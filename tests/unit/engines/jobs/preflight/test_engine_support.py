"""A local model that an engine would refuse is refused by the plan, in the engine's own words."""

import json
from pathlib import Path

import pytest

from engines.config.backends import BACKENDS
from engines.config.training import TrainingConfig
from engines.jobs.preflight.models import look_at_rollout, look_at_training
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt_oss"}, "a gpt_oss model with attention sinks; need"),
        ({"model_type": "mamba2", "layer_types": ["linear_attention"]}, "type linear_attention"),
        (
            {"text_config": {"model_type": "tiny", "use_bidirectional_attention": "all"}},
            "attention to later tokens",
        ),
        ({"model_type": "gemma3", "vision_config": {"depth": 1}}, "which sees images; of those"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused_by_the_plan(
    tmp_path: Path, config: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said) as found:
        look_at_training(str(tmp_path), TrainingConfig())
    assert found.value.path == "model.path"
    look_at_training(str(tmp_path), None)
    look_at_training("owner/of_the_hub", TrainingConfig())


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_is_asked_before_anything_runs(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    with pytest.raises(
        ConfigError, match=r"^model\.path: got .*, a gpt_oss model.*; need .*; choose"
    ):
        look_at_training(str(tmp_path), TrainingConfig(backend=backend))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    look_at_training(str(tmp_path), TrainingConfig(backend=backend))


def test_a_rollout_engine_is_asked_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "diffllama"}))
    with pytest.raises(ConfigError, match="got transformers; .* layers that attend twice") as found:
        look_at_rollout(str(tmp_path), "transformers")
    assert found.value.path == "rollout.engine"
    for engine in (None, "vllm"):
        look_at_rollout(str(tmp_path), engine)
    look_at_rollout("owner/of_the_hub", "transformers")
