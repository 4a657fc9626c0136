"""Stop strings: where the text of sampled tokens first contains one of them; for every engine.

Promises: a sample ends at the first token behind which the text of all its sampled tokens, its
prefix among them, contains a stop string; text is what the `tokenizer.json` of the served model
directory decodes and a reward function sees, without special tokens. A stop string that is itself
the text of a special token means that token, and others are not found inside of it. The cost of a
token does not grow with the length of the sample.
Does not promise: to find a string that holds U+FFFD, which stands for bytes of an unfinished
character; and of a tokenizer whose text of a token depends on tokens far before it, the first
place.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engines.errors import RolloutError
from engines.types import RolloutRequest

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""A character of UTF-8 has at most 4 bytes: tokens that held back more are no text at all."""


class SampledText:
    """The text of one sample as it grows.

    Tokens are decoded behind the few before them, for the text of a token may depend on those
    (a space in front of a word, bytes of one character in several tokens).

    Args:
        tokenizer: decodes.
        stop: strings to look for, none of them empty.
        stop_token_ids: special tokens that end the sample as well.
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
        """Append tokens up to the first that completes a stop string.

        Args:
            token_ids: behind those of earlier calls.

        Returns:
            How many of them there are up to that one, it included; None: none does.
        """
        for number, token in enumerate(token_ids, 1):
            if self._append(token):
                return number
        return None

    def _append(self, token: int) -> bool:
        self._window.append(token)
        fresh = self._decode(self._window)[len(self._known) :]
        text = self._tail + fresh
        whole = fresh and not fresh.endswith(UNFINISHED)
        if whole or len(self._window) - self._num_read >= MAX_HELD_TOKENS:
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._known = self._decode(self._window)
            self._tail = text[-self._num_kept :] if self._num_kept else ""
        return token in self._stop_token_ids or any(stop in text for stop in self._stop)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """Follows samples for one engine. The tokenizer is read when the first stop string comes.

    Args:
        hf_dir: the served model directory.
    """

    def __init__(self, hf_dir: Path) -> None:
        self._path = hf_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special: dict[str, int] = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to read."""
        return self._path.is_file()

    def follow(self, request: RolloutRequest, place: int) -> SampledText | None:
        """Start to follow the sample of one seed, behind its prefix.

        Args:
            request: of the sample.
            place: of the seed.

        Returns:
            Its text; None for a request without stop strings.

        Raises:
            RolloutError: no tokenizer, or the prefix contains a stop string already.
        """
        if not request.sampling.stop:
            return None
        tokenizer, stop = self._load(request.request_id), request.sampling.stop
        text = SampledText(
            tokenizer,
            [each for each in stop if each not in self._special],
            [self._special[each] for each in stop if each in self._special],
        )
        if text.contains_stop(request.prefix(place)) is not None:
            raise RolloutError(
                f"{request.request_id}: the prefix of sample {request.sample_index(place)} contains"
                " a stop string; it is finished"
            )
        return text

    def _load(self, request_id: str) -> Tokenizer:
        if self._tokenizer is None:
            if not self.has_tokenizer:
                raise RolloutError(
                    f"{request_id}: stop strings need a tokenizer and {self._path} does not exist; "
                    "save one there, or use stop_token_ids"
                )
            self._tokenizer = Tokenizer.from_file(str(self._path))
            added = self._tokenizer.get_added_tokens_decoder()
            self._special = {token.content: id_ for id_, token in added.items() if token.special}
        return self._tokenizer
