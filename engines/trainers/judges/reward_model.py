"""Scores of a discriminative reward model: the role `reward`.

Promises: a score is the head's output after the last token of the conversation in the model's own
chat template, as in transformers' sequence classification models. A conversation that is too long
has no score. The template closes the turn of a cut answer as usual.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from engines.data.read.chat import render_whole
from engines.data.read.rows import Message
from engines.data.read.tokenizer import ChatTokenizer
from engines.types import TokenBatch

Behind = Callable[[TokenBatch], Tensor]
"""(B,) output of a value model after the last token of each sequence."""


class RewardModelJudge:
    """Scores conversations of at most `max_length` tokens."""

    def __init__(self, behind: Behind, tokenizer: ChatTokenizer, max_length: int) -> None:
        self._behind, self._tokenizer, self._max_length = behind, tokenizer, max_length

    def scores(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str]
    ) -> list[float | None]:
        """Return the scores of answers to message lists; None if a conversation is too long."""
        conversations = [
            (*prompt, Message("assistant", answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        ids = render_whole(self._tokenizer, conversations)
        # Samples of one prompt are often equal.
        read = list(dict.fromkeys(each for each in ids if 0 < len(each) <= self._max_length))
        if not read:
            return [None] * len(ids)
        found = self._behind(TokenBatch.from_sequences([list(each) for each in read])).tolist()
        score_of = dict(zip(read, found, strict=True))
        return [score_of.get(each) for each in ids]
