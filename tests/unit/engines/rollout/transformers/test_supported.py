"""What a configuration alone tells of a model that the engine does not serve."""

from typing import Any

import pytest

from engines.rollout.transformers.supported import refusal


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"layer_types": ["full_attention", "conv"]}, "layers of type conv"),
        ({"attn_logit_softcapping": 30.0}, "attention scores with a soft cap"),
        ({"use_bidirectional_attention": False}, None),
        ({"use_bidirectional_attention": "vision"}, None),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
    ],
)
def test_what_is_refused(config: dict[str, Any], reason: str | None) -> None:
    assert refusal(config) == reason
