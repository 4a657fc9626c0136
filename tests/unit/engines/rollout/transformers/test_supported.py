"""What a configuration alone tells of a model that the engine does not serve."""

from typing import Any

import pytest

from engines.rollout.transformers.options import refusal


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"attn_logit_softcapping": 30.0}, "attention scores with a soft cap"),
        ({"model_type": "diffllama"}, "layers that attend twice"),
        ({"model_type": "moshi"}, "a window that its attention is not told of"),
        (
            {"model_type": "moshi", "sliding_window": 8},
            "a window that its attention is not told of",
        ),
        ({"model_type": "moshi", "sliding_window": None}, None),
    ],
)
def test_what_is_refused(config: dict[str, Any], reason: str | None) -> None:
    assert refusal(config) == reason
