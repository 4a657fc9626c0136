"""Token ids and loss masks, checked against tokens read by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.chat import (
    end_of_turn_id,
    prompt_text,
    render_conversations,
    render_prompts,
    render_sft,
)
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

ALPHABET = "0123456789+= abc\n"
USER, ANSWER = Message("user", "1+2="), Message("assistant", "30")
LINES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Ends every turn with the end token and a line break, as ChatML does."""
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('=')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Shortens earlier answers, as templates of reasoning models drop earlier thoughts."""
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content.split('=')[-1] if not loop.last else m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(TokenizerConfig(), [ALPHABET], path, max_length=64)


def load(directory: Path, template: str | None = None) -> DirectoryTokenizer:
    return DirectoryTokenizer.load(directory, template)


def trained_text(tokenizer: DirectoryTokenizer, *messages: Message) -> list[str]:
    """The runs of tokens with mask 1, as text."""
    rendered = render_sft(tokenizer, messages)
    runs: list[list[int]] = [[]]
    for token, trained in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_ids_and_mask_by_hand(directory: Path) -> None:
    tokenizer = load(directory)
    # Ids: pad 0, end 1, unk 2, system 3, user 4, assistant 5, then the sorted characters:
    # newline 6, space 7, + 8, digits 9..18, = 19, a 20, b 21, c 22.
    assert render_prompts(tokenizer, [[USER]])[0] == (4, 10, 8, 11, 19, 5)
    rendered = render_sft(tokenizer, [USER, ANSWER])
    assert rendered.input_ids == (4, 10, 8, 11, 19, 5, 12, 9, 1)
    assert rendered.loss_mask == (0, 0, 0, 0, 0, 0, 1, 1, 1)


def test_every_assistant_turn_is_trained_on(directory: Path) -> None:
    chat = [USER, ANSWER, Message("user", "a"), Message("assistant", "b c")]
    assert trained_text(load(directory), *chat) == ["30<|end|>", "b c<|end|>"]


def test_what_follows_the_end_token_is_not_trained_on(directory: Path) -> None:
    tokenizer = load(directory, LINES)
    chat = [USER, ANSWER, Message("user", "a"), Message("assistant", "b\n")]
    assert trained_text(tokenizer, *chat) == ["30<|end|>", "b\n<|end|>"]
    assert tokenizer.decode(render_sft(tokenizer, chat).input_ids).endswith("b\n<|end|>\n")


contents = st.text(ALPHABET, min_size=1, max_size=8).filter(str.strip)


@given(
    st.lists(st.tuples(contents, contents), min_size=1, max_size=3), st.sampled_from([None, LINES])
)
def test_training_and_rollout_see_one_prompt(
    directory: Path, turns: list[tuple[str, str]], template: str | None
) -> None:
    tokenizer = load(directory, template)
    chat = [
        message
        for question, answer in turns
        for message in (Message("user", question), Message("assistant", answer))
    ]
    rendered = render_sft(tokenizer, chat)
    prompt = render_prompts(tokenizer, [chat[:-1]])[0]
    assert rendered.input_ids[: len(prompt)] == prompt
    assert sum(rendered.loss_mask[len(prompt) :]) == len(chat[-1].content) + 1
    assert sum(rendered.loss_mask) == sum(len(answer) + 1 for _, answer in turns)
    assert tokenizer.decode(rendered.input_ids[: len(prompt)]) == prompt_text(tokenizer, chat[:-1])


def test_history_rewriting_template_needs_generation_blocks(directory: Path) -> None:
    chat = [USER, Message("assistant", "a=b"), USER, Message("assistant", "c=a")]
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: renders earlier turns diff.*blocks"
    ):
        render_sft(load(directory, FORGETFUL), chat)
    assert trained_text(load(directory, FORGETFUL), *chat[:2]) == ["a=b<|end|>"]
    assert trained_text(load(directory, MARKED), *chat) == ["b<|end|>", "c=a<|end|>"]


def test_what_a_tool_returned_is_read_and_not_trained_on(directory: Path) -> None:
    chat = [USER, ANSWER, Message("tool", "12"), Message("tool", "3"), Message("assistant", "b")]
    tokenizer = load(directory, LINES)
    assert trained_text(tokenizer, *chat) == ["30<|end|>", "b<|end|>"]
    other = [*chat[:2], Message("tool", "21"), *chat[3:]]
    assert render_sft(tokenizer, chat).input_ids != render_sft(tokenizer, other).input_ids


def test_a_template_that_skips_tools_is_refused(directory: Path) -> None:
    deaf = LINES.replace("in messages", "in messages if m.role != 'tool'")
    chat = [USER, ANSWER, Message("tool", "12"), ANSWER]
    assert trained_text(load(directory, deaf), *chat[:2]) == ["30<|end|>"]
    with pytest.raises(ConfigError, match=r"model\.chat_template: leaves out what a tool returned"):
        render_sft(load(directory, deaf), chat)
    with pytest.raises(ConfigError, match=r"model\.chat_template: leaves out what a tool returned"):
        render_prompts(load(directory, deaf), [[*chat, USER]])


def test_the_first_token_is_never_trained_on(directory: Path) -> None:
    silent = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    rendered = render_sft(load(directory, silent), [USER, ANSWER])
    assert (rendered.input_ids, rendered.loss_mask) == ((12, 9), (0, 1))


def test_end_of_turn(directory: Path) -> None:
    assert end_of_turn_id(load(directory)) == 1
    other = LINES.replace("<|end|>", "<|system|>")
    assert end_of_turn_id(load(directory, other)) == 3
    nothing = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert end_of_turn_id(load(directory, nothing)) is None


def test_many_are_rendered_as_one_is(directory: Path) -> None:
    tokenizer = load(directory)
    chats = [[USER, ANSWER], [USER, ANSWER, USER, ANSWER]]
    assert render_conversations(tokenizer, chats) == [render_sft(tokenizer, chat) for chat in chats]


def test_no_template(directory: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        render_prompts(load(tmp_path), [[USER]])[0]
