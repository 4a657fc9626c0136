"""Judges: a language model that is asked about answers, and a discriminative reward model.

They are asked before the reward function is called.
Promises: equal questions are asked once per call, and their seed comes from the text, so that a
resumed run asks with the same seed. A question without room for its answer, or whose answer was cut
or aborted, has no judgement. A reward model's score is the head's output after the last token of
the conversation in the model's own chat template, as in transformers' sequence classification
models; a conversation that is too long has none. The template closes the turn of a cut answer as
usual.
Does not promise: that judgements are independent of the batch; that is up to the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engines.config.model import JudgeConfig
from engines.data.read.chat import render_prompts, render_whole
from engines.data.read.rows import Message
from engines.data.read.tokenizer import ChatTokenizer
from engines.judges.judgement import question
from engines.rewards.base import ScoreRequest
from engines.types import Generate, RolloutRequest, SamplingParams, TokenBatch


class GenerativeJudge:
    """Prompts a language model to judge samples; `seed_of` returns the seed of a question."""

    def __init__(
        self,
        generate: Generate,
        tokenizer: ChatTokenizer,
        config: JudgeConfig,
        sampling: SamplingParams,
        seed_of: Callable[[str], int],
    ) -> None:
        self._generate, self._tokenizer = generate, tokenizer
        self._config, self._sampling, self._seed_of = config, sampling, seed_of
        self._longest = config.max_length - config.sampling.max_new_tokens
        self._num_calls = 0

    def judgements(
        self, prompts: Sequence[Sequence[Message]], samples: Sequence[ScoreRequest]
    ) -> list[str | None]:
        """Return the judge's text for each sample; None if it was not asked or did not finish."""
        pairs = zip(prompts, samples, strict=True)
        texts = [question(self._config.prompt, *pair) for pair in pairs]
        unique = list(dict.fromkeys(texts))
        if not unique:
            return []
        messages = [(Message("user", text),) for text in unique]
        ids = dict(zip(unique, render_prompts(self._tokenizer, messages), strict=True))
        asked = [text for text in unique if len(ids[text]) <= self._longest]
        self._num_calls += 1
        requests = [
            RolloutRequest(
                f"judge/{self._num_calls}/{place}",
                ids[text],
                self._sampling,
                (self._seed_of(text),),
            )
            for place, text in enumerate(asked)
        ]
        answers = self._generate(requests) if requests else []
        said = {
            text: self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            for text, [completion] in zip(asked, answers, strict=True)
            if completion.finish_reason == "stop"
        }
        return [said.get(text) for text in texts]


Behind = Callable[[TokenBatch], Tensor]
"""(B,) output of a value model after the last token of each sequence."""


class RewardModelJudge:
    """Scores conversations of at most `max_length` tokens with a reward model."""

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
        found = self._behind(TokenBatch.from_sequences([list(each) for each in read]))
        score_of = dict(zip(read, found.tolist(), strict=True))
        return [score_of.get(each) for each in ids]


@dataclass(frozen=True)
class Judges:
    """The models that score a recipe's answers; None for one that the recipe lacks."""

    reward_model: RewardModelJudge | None = None
    judge: GenerativeJudge | None = None

    def ask(
        self, prompts: Sequence[Sequence[Message]], samples: Sequence[ScoreRequest]
    ) -> list[ScoreRequest]:
        """Return the samples with the judges' scores and texts; `prompts` are their messages."""
        told = list(samples)
        if self.reward_model is not None:
            scores = self.reward_model.scores(prompts, [each.solution_str for each in samples])
            told = [
                replace(each, model_score=score) for each, score in zip(told, scores, strict=True)
            ]
        if self.judge is not None:
            texts = self.judge.judgements(prompts, samples)
            told = [replace(each, judgement=text) for each, text in zip(told, texts, strict=True)]
        return told


NO_JUDGES = Judges()
