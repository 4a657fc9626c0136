"""A tokenizer directory without transformers, compared with transformers."""

import json
from pathlib import Path

import pytest

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.chat import render_prompts, render_sft
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer, check_same_tokens, template_source
from infra.errors import ConfigError

TEXTS = ["12+34=640", "The quick brown fox\n\njumps  over 1,234 dogs. ", "\u00fc\u4e2d\U0001f600"]


def test_stored_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(), TEXTS, tmp_path, max_length=64)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(stored), encoding="utf-8")
    tokenizer = DirectoryTokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("12+34", add_special_tokens=False)) == "12+34"


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* has no tokenizer\.json"):
        DirectoryTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        DirectoryTokenizer.load(tmp_path)
    train_tokenizer(TokenizerConfig(), TEXTS, tmp_path, max_length=64)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not JSON"):
        DirectoryTokenizer.load(tmp_path)


def test_forms_of_a_template() -> None:
    assert template_source("x") == "x"
    assert template_source({"default": "x", "tool_use": "y"}) == "x"
    assert template_source([{"name": "default", "template": "x"}]) == "x"
    assert template_source(None) is None


def test_special_tokens_as_objects_and_templates_in_the_config(tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(), TEXTS, tmp_path, max_length=64)
    (tmp_path / "chat_template.jinja").unlink()
    config = {"eos_token": {"content": "<|end|>", "special": True}, "chat_template": "inside"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = DirectoryTokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == 1
    assert "pad_token" not in tokenizer.special_tokens_map
    assert tokenizer.chat_template == "inside"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_transformers_reads_the_same(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    template = (
        "{{- bos_token }}{%- for m in messages %}\n"
        "    {{- '<|' + m['role'] + '|>' + m['content'] | trim }}\n"
        "    {%- if m['role'] == 'assistant' %}\n        {{- eos_token }}\n    {%- endif %}\n"
        "{%- endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300})
    for chat_template in (None, template):
        out = tmp_path / str(chat_template is None)
        train_tokenizer(config, TEXTS, out, max_length=64, chat_template=chat_template)
        ours, theirs = DirectoryTokenizer.load(out), AutoTokenizer.from_pretrained(out)
        for text in TEXTS:
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, add_special_tokens=False) == ids
            assert ours.decode(ids) == theirs.decode(ids) == text
        assert ours.eos_token_id == theirs.eos_token_id
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert len(ours) == len(theirs)
        assert theirs.model_max_length == 64
        chat = [Message("user", "12+34="), Message("assistant", "640")]
        dicts = [{"role": m.role, "content": m.content} for m in chat]
        whole = theirs.apply_chat_template(dicts, tokenize=True, return_dict=False)
        assert list(render_sft(ours, chat).input_ids) == whole
        assert render_sft(theirs, chat) == render_sft(ours, chat)
        opened = theirs.apply_chat_template(
            dicts[:1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert list(render_prompts(ours, [chat[:1]])[0]) == opened


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path) -> None:
    ours = train_tokenizer(TokenizerConfig(), ["0123"], tmp_path / "a", max_length=32)
    same = train_tokenizer(TokenizerConfig(), ["3210"], tmp_path / "b", max_length=32)
    other = train_tokenizer(TokenizerConfig(), ["012+"], tmp_path / "c", max_length=32)
    check_same_tokens(ours, ours)
    check_same_tokens(ours, same)
    tokens = [DirectoryTokenizer.load(each).tokens for each in (ours, other)]
    first = next(i for i in sorted(tokens[0]) if tokens[0][i] != tokens[1].get(i))
    with pytest.raises(ConfigError) as caught:
        check_same_tokens(ours, other)
    assert f"has {tokens[1][first]!r} at id {first}, the policy's has" in str(caught.value)
    (other / "tokenizer.json").unlink()
    check_same_tokens(ours, other)
