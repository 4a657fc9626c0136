"""Rows to token ids, under length limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read import examples
from engines.data.read.chat import RenderedConversation
from engines.data.read.examples import rl_prompts, sft_examples, within
from engines.data.read.lazy_sequence import PackedConversations
from engines.data.read.rows import Message, RewardModel, RLRow, SFTRow
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return DirectoryTokenizer.load(
        train_tokenizer(TokenizerConfig(), ["0123456789"], directory, max_length=99)
    )


def rl_row(question: str) -> RLRow:
    return RLRow("d", (Message("user", question),), "", RewardModel("rule", "1"))


SFT_ROWS = [
    SFTRow((Message("user", "1" * n), Message("assistant", "2" * m))) for n, m in ((3, 1), (5, 2))
]


def test_sft_counts(tokenizer: DirectoryTokenizer) -> None:
    result = sft_examples(SFT_ROWS, tokenizer, max_length=10)
    # Three tokens of template: user, assistant, end.
    assert [len(example.input_ids) for example in result.examples] == [7, 10]
    assert [sum(example.loss_mask) for example in result.examples] == [2, 3]


def test_overlong_conversations(tokenizer: DirectoryTokenizer) -> None:
    with pytest.raises(ConfigError) as error:
        sft_examples(SFT_ROWS, tokenizer, max_length=9)
    assert str(error.value) == (
        "model.max_length: 1 of 2 conversations exceed 9 tokens (the longest, row 1, has 10); "
        "raise it, or leave such rows out of the data"
    )
    assert within([7, 10], 9, "drop", ("model.max_length", "conversations")) == [0]


def test_prompts_keep_the_index_of_their_row(tokenizer: DirectoryTokenizer) -> None:
    rows = [rl_row("1" * n) for n in (2, 9, 4)]
    told: list[list[int]] = []
    prompts = rl_prompts(rows, tokenizer, lambda lengths: (told.append([*lengths]), [0, 2])[1])
    assert told == [[4, 11, 6]]
    assert [(prompt.index, prompt.row) for prompt in prompts] == [(0, rows[0]), (2, rows[2])]
    assert prompts[0].prompt_ids == (4, 7, 7, 5)
    assert [prompt.index for prompt in rl_prompts(rows, tokenizer)] == [0, 1, 2]


def test_a_template_that_renders_a_prompt_to_nothing_is_refused(
    tokenizer: DirectoryTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "render_prompts", lambda _, prompts: [(5,), (), ()])
    with pytest.raises(
        ConfigError, match=r"model.chat_template: renders 2 of 3 prompts to 0 tokens \(first row 1"
    ):
        rl_prompts([rl_row("1")] * 3, tokenizer)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1))), max_size=8))
def test_packed_conversations_are_a_sequence_of_them(
    conversations: list[list[tuple[int, int]]],
) -> None:
    plain = [
        RenderedConversation(tuple(token for token, _ in each), tuple(mask for _, mask in each))
        for each in conversations
    ]
    packed = PackedConversations()
    for each in plain:
        packed.append(each)
    assert list(packed) == plain
    assert packed[::-2] == plain[::-2]
    assert [packed[-place] for place in range(1, len(plain) + 1)] == plain[::-1]
    assert list(packed.lengths) == [len(each.input_ids) for each in plain]
    with pytest.raises(IndexError):
        packed[len(plain)]
