"""Models that TorchTitan's decoder would compute otherwise than transformers does."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engines.architecture import text_settings
from engines.training.supported_models import TITAN_HEAD_NORMS, check_torchtitan
from infra.errors import ConfigError

HF_DIR = Path("/models/tiny")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss model; need one of llama, qwen3"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "with the activation gelu"),
        ({"model_type": "llama", "attention_bias": True}, "with attention biases"),
        ({"model_type": "llama", "mlp_bias": True}, "with biases in its MLP"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "with rotary embeddings of type linear",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "with layers of type sliding_attention",
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 0,
            },
            "with sliding windows",
        ),
    ],
)
def test_what_the_decoder_has_not_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path: got {HF_DIR}, a .*{said}.*; choose "):
        check_torchtitan(HF_DIR, config)


@pytest.mark.parametrize("model_type", TITAN_HEAD_NORMS)
def test_what_was_tested_is_taken(model_type: str) -> None:
    check_torchtitan(HF_DIR, {"model_type": model_type})
    check_torchtitan(HF_DIR, text_settings(AutoConfig.for_model(model_type)))
