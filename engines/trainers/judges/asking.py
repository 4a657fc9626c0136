"""Every model that judges, asked before the reward function is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.data.read.rows import Message
from engines.rewards.base import ScoreRequest
from engines.trainers.judges.generative import GenerativeJudge
from engines.trainers.judges.reward_model import RewardModelJudge


@dataclass(frozen=True)
class Judges:
    """What a recipe has of them.

    Attributes:
        reward_model: the role `reward`.
        judge: a language model.
    """

    reward_model: RewardModelJudge | None = None
    judge: GenerativeJudge | None = None

    def ask(
        self, prompts: Sequence[Sequence[Message]], samples: Sequence[ScoreRequest]
    ) -> list[ScoreRequest]:
        """Ask them about each sample.

        Args:
            prompts: the messages that each answers.
            samples: what is to be judged.

        Returns:
            The samples, with what the models said.
        """
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
