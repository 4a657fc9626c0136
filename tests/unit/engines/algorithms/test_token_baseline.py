"""A baseline for each token or turn: by hand, and the paper's mean in plain floats."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from engines.algorithms.advantage import advantages
from engines.config.algorithm import AlgorithmConfig
from engines.types import TokenBatch


@dataclass(frozen=True)
class Answer:
    """Of one group; per token: trained or not, reward, probability, sum of squares."""

    group: int
    mask: list[int]
    rewards: list[float]
    chosen: list[float]
    squares: list[float]

    def kept(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]

    def returns(self) -> list[float]:
        """To go, of the trained tokens."""
        return [sum(self.rewards[u] for u in self.kept()[i:]) for i in range(len(self.kept()))]

    def energies(self) -> list[float]:
        """So far, of the trained tokens."""
        own = [1 - 2 * self.chosen[t] + self.squares[t] for t in self.kept()]
        return [sum(own[: i + 1]) for i in range(len(own))]

    def turns(self) -> list[int]:
        """Number of the turn of each trained token."""
        found, turn = [], -1
        for t, m in enumerate(self.mask):
            if m:
                turn += t == 0 or not self.mask[t - 1]
                found.append(turn)
        return found


def doubles(numbers: Iterable[float]) -> torch.Tensor:
    return torch.tensor([*numbers], dtype=torch.float64)


def estimate(name: str, answers: list[Answer]) -> list[list[float]]:
    """Advantages of the trained tokens of each answer."""
    batch = TokenBatch.from_sequences(
        [[1] * len(a.mask) for a in answers],
        loss_mask=[[float(m) for m in a.mask] for a in answers],
    ).with_columns(
        old_logprobs=torch.tensor(
            [math.log(p) for a in answers for p in a.chosen], dtype=torch.float64
        ),
        sum_pi_squared=torch.tensor([s for a in answers for s in a.squares], dtype=torch.float64),
    )
    found = advantages(
        AlgorithmConfig(adv_estimator=name), batch,
        torch.tensor([r for a in answers for r in a.rewards], dtype=torch.float64),
        torch.tensor([a.group for a in answers]),
    ).advantages_T  # fmt: skip
    pieces = found.split([len(a.mask) for a in answers])
    for piece, answer in zip(pieces, answers, strict=True):
        assert not piece[[not m for m in answer.mask]].any()
    return [[piece[t].item() for t in a.kept()] for piece, a in zip(pieces, answers, strict=True)]


def test_by_hand() -> None:
    # Energies: first answer 1 - 1 + 0.5 = 0.5 then 1.0; second 1 - 0.4 + 0.3 = 0.9.
    # At token 0: baseline (1 x 0.5 + 0 x 0.9) / 1.4; at token 1 the first is alone: 0.
    answers = [
        Answer(0, [0, 1, 1], [0, 0, 1], [1, 0.5, 0.5], [1, 0.5, 0.5]),
        Answer(0, [0, 1], [0, 0], [1, 0.2], [1, 0.3]),
    ]
    baseline = 0.5 / 1.4
    first, second = estimate("optimal_token_baseline", answers)
    assert first == pytest.approx([1 - baseline, 0])
    assert second == pytest.approx([-baseline])


def test_by_turns_by_hand() -> None:
    # The first answer's turn holds both tokens: one baseline, with the energy 1.0 at its end.
    answers = [
        Answer(0, [0, 1, 1], [0, 0, 1], [1, 0.5, 0.5], [1, 0.5, 0.5]),
        Answer(0, [0, 1], [0, 0], [1, 0.2], [1, 0.3]),
    ]
    baseline = 1.0 / 1.9
    first, second = estimate("tir_optimal_token_baseline", answers)
    assert first == pytest.approx([1 - baseline, 1 - baseline])
    assert second == pytest.approx([-baseline])


def test_where_every_token_was_certain_the_mean_has_no_weights() -> None:
    certain = [Answer(0, [1], [score], [1.0], [1.0]) for score in (1.0, 0.0)]
    assert estimate("optimal_token_baseline", certain) == [[0.5], [-0.5]]


def random_answers(seed: int) -> list[Answer]:
    source = random.Random(seed)
    found = []
    for _ in range(source.randint(1, 9)):
        mask = [0] + [int(source.random() < 0.75) for _ in range(source.randint(1, 9))]
        chosen = [source.uniform(0.05, 0.9) for _ in mask]
        found.append(
            Answer(
                source.randint(0, 2),
                mask,
                [source.choice([0.0, 1.0, source.uniform(-1, 1)]) * m for m in mask],
                chosen,
                # The chosen token's own square, and up to all the rest in one other token.
                [p * p + source.random() * (1 - p) ** 2 for p in chosen],
            )
        )
    return found


def weighted(values: list[float], weights: list[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("seed", range(30))
def test_both_agree_with_plain_floats(seed: int) -> None:
    answers = random_answers(seed)
    by_token = estimate("optimal_token_baseline", answers)
    by_turn = estimate("tir_optimal_token_baseline", answers)
    for answer, tokens, turns in zip(answers, by_token, by_turn, strict=True):
        group = [a for a in answers if a.group == answer.group]
        for i, value in enumerate(answer.returns()):
            there = [a for a in group if len(a.kept()) > i]
            baseline = weighted([a.returns()[i] for a in there], [a.energies()[i] for a in there])
            assert tokens[i] == pytest.approx(value - baseline, abs=1e-6)
            turn = answer.turns()[i]
            with_it = [a for a in group if turn in a.turns()]
            first = [a.turns().index(turn) for a in with_it]
            last = [len(a.turns()) - 1 - a.turns()[::-1].index(turn) for a in with_it]
            baseline = weighted(
                [a.returns()[j] for a, j in zip(with_it, first, strict=True)],
                [a.energies()[j] for a, j in zip(with_it, last, strict=True)],
            )
            assert turns[i] == pytest.approx(value - baseline, abs=1e-6)
