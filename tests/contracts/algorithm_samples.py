"""Samples of an RL step for tests of advantage estimators: packed, or as plain numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.advantage import SCORE, advantages
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.types import TokenBatch


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        reward: what it earned; 0 where it is not trained.
        trained: False for what an environment or a tool wrote.
        value: of a critic, before the token is chosen.
        chosen: its probability before the update.
        squares: sum of all squared probabilities at its place.
    """

    reward: float = 0.0
    trained: bool = True
    value: float = 0.0
    chosen: float = 0.5
    squares: float = 0.5


PROMPT = Token(trained=False, value=9.0, chosen=0.3, squares=0.2)
"""Stands before every answer, with numbers that would be seen if they counted."""


@dataclass(frozen=True)
class Answer:
    """One sample of a step.

    Attributes:
        tokens: behind the prompt; perhaps none of them trained.
        group: which prompt it answers.
        greedy: score of the greedy answer to the same prompt.
        last_value: of a critic, behind the last token.
        truncated: cut at the length limit.
        scores: components of the score, in the order of `estimate_answers`.
    """

    tokens: Sequence[Token]
    group: int = 0
    greedy: float = 0.0
    last_value: float = 0.0
    truncated: bool = False
    scores: tuple[float, ...] = ()

    @property
    def kept(self) -> list[Token]:
        """Its trained tokens."""
        return [token for token in self.tokens if token.trained]

    @property
    def outcome(self) -> float:
        """All that it earned."""
        return sum(token.reward for token in self.kept)


@dataclass(frozen=True)
class Estimated:
    """What an estimator said: of the trained tokens of each answer, and of the step."""

    advantages: list[list[float]]
    returns: list[list[float]]
    metrics: Mapping[str, float]


def outcome_of(score: float, mask: Sequence[int] = (1,), group: int = 0) -> Answer:
    """An answer that earns its score with its last trained token; nothing where it has none."""
    last = max((place for place, trained in enumerate(mask) if trained), default=-1)
    tokens = [Token(score * (place == last), bool(mask[place])) for place in range(len(mask))]
    return Answer(tokens, group)


def estimate_answers(
    name: str, answers: Sequence[Answer], components: Sequence[str] = (SCORE,), **settings: Any
) -> Estimated:
    """Run an estimator on answers behind a prompt each, in float64.

    Args:
        name: of the estimator.
        answers: of the step.
        components: names of each answer's `scores`, where it has some.
        **settings: of the algorithm.

    Returns:
        Its numbers, after a look at their type and at the untrained tokens.
    """
    step = [[PROMPT, *answer.tokens] for answer in answers]
    batch = _batch_of(step, answers)
    scores = [answer.scores for answer in answers if answer.scores]
    found = advantages(
        AlgorithmConfig(adv_estimator=name, **settings),
        batch,
        torch.tensor([token.reward for tokens in step for token in tokens], dtype=torch.float64),
        torch.tensor([answer.group for answer in answers]),
        scores_BR=torch.tensor(scores, dtype=torch.float64) if scores else None,
        components=components,
        truncated_B=torch.tensor([answer.truncated for answer in answers]),
    )
    returns_T = torch.zeros(batch.num_tokens) if found.returns_T is None else found.returns_T
    columns = (found.advantages_T, returns_T)
    return Estimated(*(_trained(column_T, step) for column_T in columns), found.metrics)


def _batch_of(step: Sequence[Sequence[Token]], answers: Sequence[Answer]) -> TokenBatch:
    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    tokens = [token for own in step for token in own]
    bare = TokenBatch.from_sequences([[1] * len(own) for own in step])
    return bare.with_columns(
        loss_mask=torch.tensor([float(token.trained) for token in tokens]),
        values=column([token.value for token in tokens]),
        old_logprobs=column([math.log(token.chosen) for token in tokens]),
        sum_pi_squared=column([token.squares for token in tokens]),
    ).with_rows(
        last_values=column([answer.last_value for answer in answers]),
        greedy_scores=column([answer.greedy for answer in answers]),
    )


def _trained(values_T: Tensor, step: Sequence[Sequence[Token]]) -> list[list[float]]:
    assert values_T.dtype == torch.float32
    found = []
    for own, tokens in zip(values_T.split([len(t) for t in step]), step, strict=True):
        assert not any(
            x for x, token in zip(own.tolist(), tokens, strict=True) if not token.trained
        )
        found.append([x for x, token in zip(own.tolist(), tokens, strict=True) if token.trained])
    return found


def pack(lengths: Sequence[int]) -> TokenBatch:
    """Samples of so many sampled tokens, each behind a prompt of one."""
    return TokenBatch.from_sequences(
        [[1] * (1 + length) for length in lengths],
        loss_mask=[[0.0] + [1.0] * length for length in lengths],
    )


def estimate_B(algorithm: AlgorithmConfig, scores_B: Tensor, group_B: Tensor) -> Tensor:
    """(B,) advantages of outcome rewards of samples of one token each."""
    batch = pack([1] * scores_B.numel())
    rewards_T = on_last_token(scores_B.double(), batch.columns["loss_mask"] > 0, batch)
    return advantages(algorithm, batch, rewards_T, group_B).advantages_T[1::2]
