"""Scores of a discriminative reward model: the role `reward`.

Promises: a score is what the model's head says behind the last token of the conversation in the
model's own chat template, as transformers' sequence classification models compute it; it depends
on the text alone, so the policy's tokenizer may be another. A conversation that is too long has no
score, and none is cut.
Does not promise that the score of an answer cut at its length limit means anything: the template
closes its turn like any other.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from engines.data.read.chat import render_whole
from engines.data.read.rows import Message
from engines.data.read.tokenizer import ChatTokenizer
from engines.types import TokenBatch

Behind = Callable[[TokenBatch], Tensor]
"""(B,) what a value model says behind the last token of each sequence."""


class RewardModelJudge:
    """Scores conversations.

    Args:
        behind: of the role `reward`.
        tokenizer: of the reward model.
        max_length: tokens of the longest conversation that it reads.
    """

    def __init__(self, behind: Behind, tokenizer: ChatTokenizer, max_length: int) -> None:
        self._behind, self._tokenizer, self._max_length = behind, tokenizer, max_length

    def scores(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[str]
    ) -> list[float | None]:
        """Judge answers.

        Args:
            prompts: the messages that each answers.
            answers: texts, without special tokens.

        Returns:
            One number each; None of a conversation that is too long.
        """
        conversations = [
            (*prompt, Message("assistant", answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        ids = render_whole(self._tokenizer, conversations)
        # Samples of one prompt often say the same.
        read = list(dict.fromkeys(each for each in ids if 0 < len(each) <= self._max_length))
        if not read:
            return [None] * len(ids)
        found = self._behind(TokenBatch.from_sequences([list(each) for each in read])).tolist()
        score_of = dict(zip(read, found, strict=True))
        return [score_of.get(each) for each in ids]
