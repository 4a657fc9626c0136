"""What the job loads is refused by field where it does not fit together."""

import json
from pathlib import Path

import pytest

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.jobs.policy.stage import policy_tokenizer
from infra.errors import ConfigError


def test_a_tokenizer_with_more_tokens_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(), ["0123456789"], tmp_path, max_length=32, chat_template=None)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}), encoding="utf-8")
    num_tokens = len(policy_tokenizer(tmp_path))
    for config in ({"vocab_size": 5}, {"text_config": {"vocab_size": 5}, "vocab_size": 100}):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(
            ConfigError,
            match=f"model.path: got a tokenizer of {num_tokens} tokens; .* vocabulary of 5;",
        ):
            policy_tokenizer(tmp_path)
