"""What a language model writes when it is asked about an answer: a prompt to a rollout service.

Promises: what is asked depends on the row and the answer's text alone; the same question is asked
once a call, and its seed comes from its text, so that a resumed run gets what the first one would
have; a question without room for its answer, and one whose answer was cut or aborted, has no
judgement: the last number of half a thought is not what a judge decided.
Does not promise that a service answers the same when other questions are beside one: that is the
engine's to promise.
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
    """Asks a judge.

    Args:
        generate: of a service that serves the judge.
        tokenizer: of the judge.
        config: what is asked, and how much it may read and write.
        sampling: how it answers.
        seed_of: the seed of a question.
    """

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
        """Ask about each sample.

        Args:
            prompts: the messages that each answers.
            samples: with the answers' texts.

        Returns:
            What the judge wrote of each; None where it did not come to an end.
        """
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
