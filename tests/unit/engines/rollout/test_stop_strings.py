"""Stop strings against the definition: decode every beginning of a sample anew and look."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.errors import RolloutError
from engines.rollout.stop_strings import SampledText, StopStrings
from engines.types import RolloutRequest, SamplingParams

SPECIAL = "<|im_end|>"
TEXT = "the answer is é, 你好, 🙂🙂 done.</answer> \n\n1 + 1 = 2 café"


def byte_level() -> Tokenizer:
    """All bytes, so that characters fall into pieces, and a few longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("an", "s"), ("<", "/"), ("e", "r"), ("Ġ", "a")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def words_with_spaces() -> Tokenizer:
    """The first word of a text has no space in front, every later one has."""
    words = ["<unk>", "\N{LOWER ONE EIGHTH BLOCK}a", "\N{LOWER ONE EIGHTH BLOCK}b", "c", "d"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


BYTES, WORDS = byte_level(), words_with_spaces()


def found(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], at: int = 0) -> int | None:
    """By the code; the first `at` tokens in a call of their own."""
    special = [tokenizer.token_to_id(each) for each in stop if each == SPECIAL]
    text = SampledText(tokenizer, [each for each in stop if each != SPECIAL], special)
    first = text.contains_stop(ids[:at])
    if first is not None:
        return first
    rest = text.contains_stop(ids[at:])
    return None if rest is None else at + rest


def expected(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int | None:
    for number in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:number]), skip_special_tokens=True)
        ended = SPECIAL in stop and ids[number - 1] == tokenizer.token_to_id(SPECIAL)
        if ended or any(each in text for each in stop):
            return number
    return None


STOPS = [
    (".",), ("</answer>",), (SPECIAL,), (SPECIAL, "never"), ("\n\n",), ("é",),
    ("好", "never"), ("🙂🙂",),
    ("s is", "done", "answer"), ("never", "nor this", "im_end"),
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_text_ends_where_it_first_contains_a_stop_string(stop: tuple[str, ...]) -> None:
    ids = [*BYTES.encode(TEXT).ids, BYTES.token_to_id(SPECIAL), *BYTES.encode(TEXT).ids]
    end = expected(BYTES, ids, stop)
    assert (end is None) == (stop[0] == "never")
    for at in range(0, len(ids), 7):
        assert found(BYTES, ids, stop, at) == end


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=60),
    st.text(alphabet="ab<é好", min_size=1, max_size=3),
    st.integers(0, 60),
)
@example([0xC3, *[200] * 30, *BYTES.encode("</a").ids], "</a", 3)
def test_bytes_that_are_no_text_hide_no_stop_string(ids: list[int], stop: str, at: int) -> None:
    ids = [*ids, *BYTES.encode(f" {stop} ").ids]
    end = found(BYTES, ids, (stop,), at)
    assert end == expected(BYTES, ids, (stop,))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), max_size=20), st.sampled_from(["a b", "cd", " b", "a", "bc a"]))
def test_spaces_in_front_of_words_count(ids: list[int], stop: str) -> None:
    assert found(WORDS, ids, (stop,)) == expected(WORDS, ids, (stop,))


def test_the_cost_of_a_token_does_not_grow() -> None:
    text = SampledText(BYTES, ("never",))
    text.contains_stop(BYTES.encode("abc " * 500).ids)
    assert len(text._window) <= 4
    text.contains_stop([BYTES.encode("é").ids[0]] * 500)
    assert len(text._window) <= 20
    assert len(text._tail) <= 4


def request(**changes) -> RolloutRequest:
    sampling = SamplingParams(8, stop=("b",))
    return replace(RolloutRequest("r", (1,), sampling, (0, 1)), **changes)


def test_a_request_is_followed_behind_its_prefixes(tmp_path: Path) -> None:
    BYTES.save(str(tmp_path / "tokenizer.json"))
    stop_strings = StopStrings(tmp_path)
    [a, b] = BYTES.encode("ab").ids
    assert stop_strings.follow(request(sampling=SamplingParams(8)), 0) is None
    two = SamplingParams(8, stop=("aab",))
    followed = stop_strings.follow(request(sampling=two, prefixes=((a, a), ())), 0)
    assert followed is not None
    assert followed.contains_stop([b]) == 1
    end = SamplingParams(8, stop=("never", SPECIAL))
    followed = stop_strings.follow(request(sampling=end), 0)
    assert followed is not None
    assert followed.contains_stop([a, b, BYTES.token_to_id(SPECIAL), a]) == 3
    with pytest.raises(RolloutError, match="r: the prefix of sample 5 .* the sample is finished"):
        stop_strings.follow(request(prefixes=((), (a, b)), sample_indices=(4, 5)), 1)


def test_without_a_tokenizer_stop_strings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"r: stop strings need a tokenizer .*use stop_token"):
        StopStrings(tmp_path).follow(request(), 0)
