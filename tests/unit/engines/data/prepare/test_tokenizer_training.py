"""Tokenizers trained on the data: exact decoding, equal bytes, stated limits."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

TEXTS = ["12+34=640", "a  b\n\nc\t", "ab ab abc abcd"]
CHARACTERS = "".join(sorted(set("".join(TEXTS))))


@pytest.fixture(scope="module")
def character(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    directory = tmp_path_factory.mktemp("character")
    return DirectoryTokenizer.load(
        train_tokenizer(TokenizerConfig(), TEXTS, directory, max_length=32)
    )


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    config = TokenizerConfig(kind="bpe", vocab_size=280)
    directory = tmp_path_factory.mktemp("bpe")
    return DirectoryTokenizer.load(train_tokenizer(config, TEXTS, directory, max_length=32))


@given(text=st.text(CHARACTERS, max_size=40))
def test_one_token_per_character(character: DirectoryTokenizer, text: str) -> None:
    ids = character.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert character.decode(ids) == text


def test_special_tokens_are_single_and_first(character: DirectoryTokenizer) -> None:
    text = "<|user|>1<|assistant|>2<|end|>"
    assert [len(character.encode(t, add_special_tokens=False)) for t in (text, "<|pad|>")] == [5, 1]
    assert character.all_special_ids == list(range(6))
    assert character.special_tokens_map["pad_token"] == "<|pad|>"
    assert character.encode("<|pad|>", add_special_tokens=False) == [0]
    assert character.eos_token_id == 1
    assert len(character) == 6 + len(CHARACTERS)
    ids = character.encode(text, add_special_tokens=False)
    assert character.decode(ids, skip_special_tokens=True) == "12"


def test_unknown_characters_are_marked(character: DirectoryTokenizer) -> None:
    ids = character.encode("1\u00e92", add_special_tokens=False)
    assert character.decode(ids) == "1<|unk|>2"


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_hold_every_text(bpe: DirectoryTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text, add_special_tokens=False)) == text


def test_bpe_merges_words_and_never_digits(bpe: DirectoryTokenizer) -> None:
    assert len(bpe.encode("abcd", add_special_tokens=False)) < 4
    assert len(bpe.encode("1234", add_special_tokens=False)) == 4
    assert len(bpe) <= 280


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(st.permutations(TEXTS * 2))
def test_the_order_of_texts_does_not_matter(tmp_path: Path, texts: list[str]) -> None:
    digests = set()
    for name, order in (("a", TEXTS), ("b", texts)):
        for kind in ("character", "bpe"):
            config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 280})
            out = train_tokenizer(config, order, tmp_path / name / kind, max_length=32)
            digests.add((kind, hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()))
    assert len(digests) == 2


def test_other_processes_write_the_same_bytes(tmp_path: Path) -> None:
    program = (
        "import sys, hashlib; from pathlib import Path\n"
        "from engines.config.model import TokenizerConfig\n"
        "from engines.data.prepare.tokenizer_training import train_tokenizer\n"
        "texts = [f'{a}+{b} word{a % 7} thing{b % 5}' for a in range(40) for b in range(40)]\n"
        "out = train_tokenizer(TokenizerConfig(kind='bpe', vocab_size=330), texts,\n"
        "                      Path(sys.argv[1]), max_length=9)\n"
        "print(*(hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / str(i))],
            env={"PYTHONHASHSEED": str(i), "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for i in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].split()) == 3


def test_a_vocabulary_too_small_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size: got 100; bpe needs at least 262"):
        train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=100), TEXTS, tmp_path, max_length=9)
