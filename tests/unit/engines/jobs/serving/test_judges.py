"""How much a reward model reads."""

import json
from pathlib import Path

import pytest

from engines.config.model import RewardModelConfig
from engines.jobs.serving.frozen_models import MAX_READ_TOKENS, longest_read


@pytest.mark.parametrize(
    ("context", "given", "expected"),
    [
        (64, None, 64),
        (131_072, None, MAX_READ_TOKENS),
        (None, None, MAX_READ_TOKENS),
        (131_072, 8_192, 8_192),
    ],
)
def test_reward_model_length_defaults_to_its_context_size(
    context: int | None, given: int | None, expected: int, tmp_path: Path
) -> None:
    config = {"model_type": "qwen3"}
    if context is not None:
        config |= {"max_position_embeddings": context}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_read(RewardModelConfig(max_length=given), tmp_path) == expected
