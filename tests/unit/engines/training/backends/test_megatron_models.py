"""Models that Megatron-Core would compute otherwise than transformers does, by configuration."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engines.architecture import text_settings
from engines.training.supported_models import MEGATRON_MODELS, check_megatron
from infra.errors import ConfigError

HF_DIR = Path("/models/tiny")


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        ({"model_type": "gemma3_text"}, "a gemma3_text model; need one of llama, qwen2"),
        ({"model_type": "llama", "attention_bias": True}, "attention biases"),
        ({"model_type": "llama", "mlp_bias": True}, "biases in its MLP"),
        ({"model_type": "qwen3", "hidden_act": "gelu"}, "the activation gelu"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4,
             "max_window_layers": 0},
            "sliding windows",
        ),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 4},
            "sliding windows",
        ),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "sliding windows"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "dense layers between"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True}, "expert"),
        (
            {"model_type": "llama", "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rotary embeddings of type yarn",
        ),
    ],
)  # fmt: skip
def test_architectures_are_refused_in_one_line(model: dict[str, Any], needs: str) -> None:
    whole = text_settings(AutoConfig.for_model(**model))
    for config in (whole, model):  # as the ranks have it, and as `config.json` may
        with pytest.raises(ConfigError, match=r"^model\.path: got /models/tiny, a ") as error:
            check_megatron(HF_DIR, config)
        assert needs in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", MEGATRON_MODELS)
def test_what_was_tested_is_taken(model_type: str) -> None:
    check_megatron(HF_DIR, {"model_type": model_type})
    check_megatron(HF_DIR, text_settings(AutoConfig.for_model(model_type)))


@pytest.mark.parametrize("model_type", MEGATRON_MODELS)
@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": False}])
def test_a_window_that_is_not_in_use_is_no_matter(model_type: str, switch: dict[str, Any]) -> None:
    """As Qwen publishes most of its models; a Llama's attention does not ask for it."""
    model = {"model_type": model_type, "sliding_window": 4096, "max_window_layers": 8, **switch}
    for config in (text_settings(AutoConfig.for_model(**model)), model):
        check_megatron(HF_DIR, config)
