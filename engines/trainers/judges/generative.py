"""Judgements by a language model that is served by a rollout service.

Promises: equal questions are asked once per call, and their seed comes from the text, so that a
resumed run gets the same judgement. A question without room for its answer, or whose answer was cut
or aborted, has no judgement.
Does not promise that answers are independent of the batch; that is up to the engine.
"""

from collections.abc import Callable, Sequence

from engines.config.model import JudgeConfig
from engines.data.read.chat import render_prompts
from engines.data.read.rows import Message
from engines.data.read.tokenizer import ChatTokenizer
from engines.rewards.base import ScoreRequest
from engines.rewards.judges.question import question
from engines.types import Completion, RolloutRequest, SamplingParams

Generate = Callable[[Sequence[RolloutRequest]], list[list[Completion]]]


class GenerativeJudge:
    """Asks a judge; `tokenizer` is the judge's, and `seed_of` gives the seed of a question."""

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
        """Return the judge's text for each sample; None if it did not finish."""
        template = self._config.prompt
        texts = [question(template, *pair) for pair in zip(prompts, samples, strict=True)]
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
