"""Train a tokenizer on the data set's own text, for a model made from scratch.

`character` has one token per character that occurs; `bpe` is byte-level byte-pair encoding with
single digits. Both write the files that `transformers.AutoTokenizer` reads.
Promises: equal texts give byte-equal files; decoding is exact for text of known characters (`bpe`:
for all text); special tokens have the first ids.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from engines.config.model import TokenizerConfig
from engines.data.read.chat import (
    DEFAULT_CHAT_TEMPLATE,
    END_TOKEN,
    PAD_TOKEN,
    ROLE_TOKENS,
    UNKNOWN_TOKEN,
)
from infra.errors import ConfigError

_SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, *ROLE_TOKENS)
_ADDED_TOKENS = [AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS]
_NUM_BYTES = 256


def train_tokenizer(
    config: TokenizerConfig,
    texts: Iterable[str],
    out_dir: Path,
    *,
    max_length: int,
    chat_template: str | None = None,
) -> Path:
    """Train a tokenizer, write it to `out_dir` and return that path.

    Args:
        texts: all text that the model will read or write, without the chat template; read once.
        max_length: context in tokens, recorded for other tools.

    Raises:
        ConfigError: `vocab_size` cannot hold the bytes and special tokens of `bpe`.
    """
    is_character = config.kind == "character"
    tokenizer = (
        _character_tokenizer(texts) if is_character else _bpe_tokenizer(texts, config.vocab_size)
    )
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": END_TOKEN,
        "model_max_length": max_length,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN_TOKEN,
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "chat_template.jinja": chat_template or DEFAULT_CHAT_TEMPLATE,
    }
    for name, text in files.items():
        (out_dir / name).write_text(text, encoding="utf-8", newline="")
    return out_dir


def _character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    characters = sorted({character for text in texts for character in text})
    vocabulary = {token: id_ for id_, token in enumerate((*_SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Without a decoder the library joins the characters with spaces.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(_ADDED_TOKENS)
    return tokenizer


def _bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    smallest = _NUM_BYTES + len(_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            "model.tokenizer.vocab_size",
            f"got {vocab_size}; bpe needs at least {smallest} ({_NUM_BYTES} bytes and "
            f"{len(_SPECIAL_TOKENS)} special tokens); raise it or use kind: character",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_ADDED_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_distinct(texts), trainer)
    return tokenizer


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text once, since repetition in a data set says nothing about the language."""
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield text
