"""Finds the token at which the sampled text first contains a stop string; used by every engine.

Promises: the text is that of all sampled tokens, the prefix included, as the `tokenizer.json` of
the served model decodes it without special tokens. A stop string that equals a special token
matches that token. The cost per token does not grow with the length of the sample.
Does not promise: to find a string with U+FFFD, which stands for bytes of an unfinished character;
the first match if the text of a token depends on tokens far before it.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engines.errors import RolloutError
from engines.types import RolloutRequest

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""A UTF-8 character has at most 4 bytes; more tokens than this without text are not valid UTF-8."""


class SampledText:
    """The text of one sample as it grows; the strings to look for must not be empty.

    A token is decoded together with the few before it, since its text may depend on them (a space
    before a word, one character split into several tokens).
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], stop_token_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_kept = max((len(text) for text in stop), default=1) - 1
        self._window: list[int] = []
        self._num_read = 0
        self._known = ""
        self._tail = ""

    def contains_stop(self, token_ids: Iterable[int]) -> int | None:
        """Append tokens until one completes a stop string; return how many, None if none does."""
        for number, token in enumerate(token_ids, 1):
            if self._append(token):
                return number
        return None

    def _append(self, token: int) -> bool:
        self._window.append(token)
        fresh = self._decode(self._window)[len(self._known) :]
        text = self._tail + fresh
        is_whole = fresh and not fresh.endswith(UNFINISHED)
        if is_whole or len(self._window) - self._num_read >= MAX_HELD_TOKENS:
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._known = self._decode(self._window)
            self._tail = text[-self._num_kept :] if self._num_kept else ""
        return token in self._stop_token_ids or any(stop in text for stop in self._stop)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """Makes the `SampledText` of each sample; reads the tokenizer at the first stop string."""

    def __init__(self, hf_dir: Path) -> None:
        self._path = hf_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special: dict[str, int] = {}

    @property
    def has_tokenizer(self) -> bool:
        """True if the model directory has a `tokenizer.json`."""
        return self._path.is_file()

    def follow(self, request: RolloutRequest, place: int) -> SampledText | None:
        """Return the text of a sample, which begins with its prefix; None without stop strings.

        Raises:
            RolloutError: no tokenizer, or the prefix contains a stop string already.
        """
        stop = request.sampling.stop
        if not stop:
            return None
        if self._tokenizer is None:
            if not self.has_tokenizer:
                raise RolloutError(
                    f"{request.request_id}: stop strings need a tokenizer and {self._path} does "
                    "not exist; save one there, or use stop_token_ids"
                )
            self._tokenizer = Tokenizer.from_file(str(self._path))
            self._special = {
                token.content: token_id
                for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
                if token.special
            }
        text = SampledText(
            self._tokenizer,
            [each for each in stop if each not in self._special],
            [self._special[each] for each in stop if each in self._special],
        )
        if text.contains_stop(request.prefix(place)) is not None:
            raise RolloutError(
                f"{request.request_id}: the prefix of sample {request.sample_index(place)} contains"
                " a stop string; the sample is finished"
            )
        return text
