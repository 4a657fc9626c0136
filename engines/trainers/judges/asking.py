"""Ask every judge before the reward function is called."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.data.read.rows import Message
from engines.rewards.base import ScoreRequest
from engines.trainers.judges.generative import GenerativeJudge
from engines.trainers.judges.reward_model import RewardModelJudge


@dataclass(frozen=True)
class Judges:
    """The judges of a recipe: the role `reward`, and a language model."""

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
