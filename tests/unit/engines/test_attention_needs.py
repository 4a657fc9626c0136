"""What a configuration alone tells of a model's attention."""

from typing import Any

import pytest

from engines.attention_needs import unusual_attention

WINDOWS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, None),
        ({"model_type": "qwen3", "layer_types": WINDOWS}, None),
        ({"layer_types": ["full_attention", "conv"]}, "layers of type conv"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attention scores with a soft"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, None),
        ({"use_bidirectional_attention": False}, None),
        ({"use_bidirectional_attention": "vision"}, None),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"model_type": "gpt_oss", "layer_types": WINDOWS}, "attention sinks"),
        ({"model_type": "mimo_v2_flash"}, "attention sinks"),
        ({"model_type": "mimo_v2_flash", "layer_types": WINDOWS}, "attention sinks"),
        ({"model_type": "mimo_v2_flash", "layer_types": ["full_attention"]}, None),
        ({"model_type": "doge"}, "a mask that depends on its values"),
        ({"model_type": "nemotron"}, "layers that pass no keyword arguments to their attention"),
    ],
)
def test_what_is_told(config: dict[str, Any], said: str | None) -> None:
    found = unusual_attention(config)
    assert found is None if said is None else str(found).startswith(said)
