"""What the job loads is refused by field where it does not fit together."""

import json
from pathlib import Path

import pytest

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.jobs.process.policy_stage import policy_tokenizer, prompts_within
from infra.errors import ConfigError


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
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


def test_prompts_leave_room_for_an_answer(tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(), ["0123456789"], tmp_path, max_length=32)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    tokenizer = policy_tokenizer(tmp_path)
    rows = [
        RLRow("s", (Message("user", "1" * n),), "", RewardModel("rule", "1")) for n in (3, 8, 6)
    ]
    assert [*prompts_within(rows, tokenizer, 16, 6).lengths] == [5, 10, 8]
    some = prompts_within(rows, tokenizer, 16, 8, on_overlong="drop")
    assert [prompt.index for prompt in some] == [0, 2]
    field = "rl.sampling.max_new_tokens"
    with pytest.raises(ConfigError) as found:
        prompts_within(rows, tokenizer, 16, 8)
    assert str(found.value) == (
        f"{field}: got 8; 1 of 3 prompts leave less of a context of 16 tokens (the longest, prompt "
        "1, has 10); need at most 6; lower it, or leave such prompts out"
    )
    with pytest.raises(ConfigError) as found:
        prompts_within(rows, tokenizer, 9, 1)
    assert str(found.value) == (
        f"{field}: got 1; 1 of 3 prompts leave less of a context of 9 tokens (the longest, prompt "
        "1, has 10); leave such prompts out"
    )
    with pytest.raises(
        ConfigError, match=r"3 of 3 .* \(the shortest, prompt 0, has 5\); need at mo"
    ):
        prompts_within(rows, tokenizer, 16, 12, on_overlong="drop")
    with pytest.raises(
        ConfigError, match="^data: the split of this stage has 0 rows; add a source"
    ):
        prompts_within([], tokenizer, 16, 8)
