"""A tokenizer directory, read with the `tokenizers` library alone.

Promises: token ids, special tokens and chat template equal those of `transformers.AutoTokenizer`,
without importing transformers or torch (0.2 s instead of several seconds). Needs `tokenizer.json`;
slow (sentencepiece-only) tokenizers need transformers. Both kinds satisfy `ChatTokenizer`.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from infra.errors import ConfigError

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Path in a tokenizer directory of a separate template for conversations with tools."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


class ChatTokenizer(Protocol):
    """The tokenizer interface of this package; transformers' fast tokenizers satisfy it."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of tokens, added ones included."""

    @property
    @abstractmethod
    def chat_template(self) -> Any:
        """Jinja source, a mapping of name to source, or None."""

    @property
    @abstractmethod
    def special_tokens_map(self) -> Mapping[str, Any]:
        """`eos_token` and others that the chat template may use."""

    @property
    @abstractmethod
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the special tokens."""

    @property
    @abstractmethod
    def eos_token_id(self) -> Any:
        """Id of the end-of-sequence token, or None."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""


class DirectoryTokenizer:
    """A tokenizer read from a directory. Immutable."""

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens_map: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None,
    ) -> None:
        self._backend = backend
        self.special_tokens_map = dict(special_tokens_map)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder().items()
        self.all_special_ids = sorted(id_ for id_, token in added if token.special)

    @staticmethod
    def load(directory: Path, chat_template: str | None = None) -> "DirectoryTokenizer":
        """Load a tokenizer directory; `chat_template` replaces the directory's own.

        Raises:
            ConfigError: there is no tokenizer, or its files cannot be parsed.
        """
        try:
            backend = Tokenizer.from_buffer((directory / "tokenizer.json").read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                "model.path", f"{directory} has no tokenizer.json; save a fast tokenizer there"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{directory}/tokenizer.json", f"cannot be read: {error}") from None
        config = _read_config(directory)
        # Padding and truncation settings in the file would change every result.
        backend.no_padding()
        backend.no_truncation()
        special = {n: t for n in _SPECIAL_NAMES if (t := _token_text(config.get(n))) is not None}
        return DirectoryTokenizer(backend, special, chat_template or _template(directory, config))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, or None."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokens(self) -> dict[int, str]:
        """All tokens by id, added ones included."""
        return {n: token for token, n in self._backend.get_vocab(with_added_tokens=True).items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def encode_texts(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of many texts, without added special tokens."""
    if isinstance(tokenizer, DirectoryTokenizer):
        encodings = tokenizer._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def text_config(hf_dir: Path) -> dict[str, Any]:
    """Return the configuration of a model directory, or of the text model inside it."""
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config") or config


def check_vocabulary(hf_dir: Path, num_tokens: int) -> None:
    """Raise `ConfigError` if `num_tokens`, added ones included, exceeds the model's vocabulary."""
    size = text_config(hf_dir).get("vocab_size", num_tokens)
    if num_tokens > size:
        raise ConfigError(
            "model.path",
            f"got a tokenizer of {num_tokens} tokens; need at most the model's vocabulary of "
            f"{size}; use the tokenizer of these weights, or resize their embeddings",
        )


def check_same_tokens(
    policy_dir: Path, other_dir: Path, setting: str = "rl.algorithm", name: str = "a reference"
) -> None:
    """Refuse a model whose token ids mean other tokens than the policy's.

    Compares nothing unless both directories have a `tokenizer.json`.

    Raises:
        ConfigError: names `setting`, the other model as `name`, and the first id that differs.
    """
    dirs = (policy_dir, other_dir)
    if policy_dir == other_dir or not all((each / "tokenizer.json").exists() for each in dirs):
        return
    ours, theirs = (DirectoryTokenizer.load(each).tokens for each in dirs)
    differ = [number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number)]
    if differ:
        first = min(differ)
        raise ConfigError(
            setting,
            f"got {name} whose tokenizer has {theirs.get(first)!r} at id {first}, the "
            f"policy's has {ours.get(first)!r}; need equal ids, so that both read the same text; "
            "use a model of the policy's family",
        )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON ({error})") from None
    return config if isinstance(config, dict) else {}


def _template(directory: Path, config: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """Return the template, or templates by name if conversations with tools have their own."""
    paths = {"default": directory / "chat_template.jinja", "tool_use": directory / TOOL_TEMPLATE}
    files = {n: path.read_text(encoding="utf-8") for n, path in paths.items() if path.is_file()}
    found = files or {
        name: source
        for name in paths
        if (source := template_source(config.get("chat_template"), name == "tool_use")) is not None
    }
    same = found.get("tool_use") in (None, found.get("default"))
    return found.get("default") if same else found


def template_source(value: object, offers_tools: bool = False) -> str | None:
    """Return the Jinja source from the forms in which tokenizers store templates.

    `value` is a source, a mapping by name, or a list of `{name, template}`. With `offers_tools`,
    the template named `tool_use` has priority over `default`.
    """
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if isinstance(value, Mapping):
        named = value.get("tool_use") if offers_tools else None
        value = value.get("default") if named is None else named
    return value if isinstance(value, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
