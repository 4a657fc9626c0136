"""Steps for tests of policy losses, as plain numbers: a formula in floats against the objective.

Promises: a formula sees trained tokens only and uses no torch; its gradient is a central
difference of each addend, so that a huge token does not hide the slope of a small one.
"""

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engines.algorithms.parts import Gather
from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows import POLICY_LOSSES
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

MAX_NEW_TOKENS = 8
STEP = 1e-5
"""Of the central difference: its own error is about 1e-10 of the slope."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Token:
    """One token of a sequence.

    Attributes:
        policy: log-probability under the policy; what a formula means by a stopped gradient.
        old: the same before the update.
        advantage: of the token.
        trained: False for a prompt and for what an environment wrote.
        uniform: drawn for the token, in [0, 1).
        moved: by how much the central difference moves `policy`.
    """

    policy: float
    old: float
    advantage: float
    trained: bool = True
    uniform: float = 0.5
    moved: float = 0.0

    @property
    def live(self) -> float:
        """The log-probability as the gradient sees it."""
        return self.policy + self.moved


Answer = Sequence[Token]
Step = Sequence[Answer]
Formula = Callable[[Step], Sequence[Sequence[float]]]
"""Of the trained tokens of each answer to the loss of each of them."""
PROMPT = Token(-7.0, -2.0, 9.0, trained=False, uniform=0.0)
"""Untrained, and with numbers that would be seen if they counted."""


@dataclass(frozen=True)
class Measured:
    """What the objective says: the loss, its gradient by answer and token, and the metrics."""

    loss: float
    gradient: list[list[float]]
    metrics: dict[str, float]


def answer_of(ratios: Sequence[float], *advantages: float, policy: float = -1.0) -> list[Token]:
    """An answer behind a prompt, of tokens with these ratios; one advantage for all, or one each.

    Behind its first token stands one that an environment wrote.
    """
    each = advantages if len(advantages) > 1 else advantages * len(ratios)
    tokens = [
        Token(policy, policy - math.log(ratio), advantage)
        for ratio, advantage in zip(ratios, each, strict=True)
    ]
    return [PROMPT, tokens[0], PROMPT, *tokens[1:]]


def random_step(
    seed: int, num_answers: int = 5, *, one_advantage: bool = False, farthest: float = 25.0
) -> Step:
    """Ragged answers with prompts and gaps, some of them without a trained token.

    Args:
        seed: equal seeds give equal steps.
        num_answers: every fifth has no trained token.
        one_advantage: one number for an answer, else one for each token.
        farthest: the largest log-ratio, on either side.

    Returns:
        Tokens whose log-probabilities are below 0.
    """
    source = random.Random(seed)
    step = []
    for index in range(num_answers):
        num_prompt, length = source.randint(1, 2), source.randint(1, 6)
        share, advantage = 0.0 if index % 5 == 3 else 0.8, source.gauss(0, 1.5)
        answer = [PROMPT] * num_prompt
        for place in range(length):
            trained = source.random() < share or index == place == 0
            own = advantage if one_advantage else source.gauss(0, 1.5)
            answer.append(_random_token(source, own, trained, farthest))
        step.append(answer)
    return step


def _random_token(source: random.Random, advantage: float, trained: bool, farthest: float) -> Token:
    near, wide = source.uniform(-0.3, 0.3), source.gauss(0, 2)
    log_ratio = source.choice([near, near, wide, wide, farthest, -farthest])
    larger = source.uniform(-3.0, -0.05)
    policy, old = larger + min(log_ratio, 0.0), larger - max(log_ratio, 0.0)
    return Token(policy, old, advantage, trained, source.random())


def column_of(step: Step, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """(T,) one number of every token."""
    return torch.tensor([getattr(token, name) for answer in step for token in answer], dtype=dtype)


def batch_of(step: Step, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """The step packed, with all columns that a loss may read."""
    bare = TokenBatch.from_sequences([[1] * len(answer) for answer in step])
    return bare.with_columns(
        loss_mask=column_of(step, "trained", torch.float32),
        advantages=column_of(step, "advantage", dtype),
        old_logprobs=column_of(step, "old", dtype),
        uniform=column_of(step, "uniform"),
    )


def counts_of(batch: TokenBatch, extras: dict[str, float] | None = None) -> GlobalCounts:
    """Trained tokens, and sequences that have one."""
    mask_T = batch.columns["loss_mask"] > 0
    num_sequences = int(batch.sequence_index_T[mask_T].unique().numel())
    return GlobalCounts(int(mask_T.sum()), num_sequences, num_sequences, extras or {})


def measure(algorithm: AlgorithmConfig, step: Step) -> Measured:
    """The objective on the whole step at once, in float64."""
    objective = policy_loss_fn(algorithm, MAX_NEW_TOKENS)
    batch = batch_of(step)
    extras = dict(objective.extras(batch, lambda own_N: own_N.double()))
    leaf_T = column_of(step, "policy").requires_grad_()
    result = objective(ModelOutputs(leaf_T), batch, counts_of(batch, extras))
    result.loss.backward()
    assert leaf_T.grad is not None
    parts = leaf_T.grad.split([len(answer) for answer in step])
    metrics = {name: value.item() for name, value in result.metrics.items()}
    return Measured(result.loss.item(), [part.tolist() for part in parts], metrics)


def measure_answer(algorithm: AlgorithmConfig, answer: Answer) -> tuple[float, list[float]]:
    """Loss, and gradient of the trained tokens, of a step of one answer."""
    got = measure(algorithm, [answer])
    slopes = zip(answer, got.gradient[0], strict=True)
    return got.loss, [slope for token, slope in slopes if token.trained]


def addends(step: Step, formula: Formula, mode: str) -> list[float]:
    """What the loss of the step is the sum of, aggregated by plain counting."""
    answers = [[token for token in answer if token.trained] for answer in step]
    losses = formula(answers)
    num_tokens, num_answers = sum(map(len, answers)), sum(map(bool, answers))
    if mode == "token-mean":
        return [loss / num_tokens for each in losses for loss in each]
    assert mode == "seq-mean-token-mean"
    return [loss / (len(each) * num_answers) for each in losses for loss in each]


def slope_at(step: Step, place: tuple[int, int], formula: Formula, mode: str) -> float:
    """Central difference of the loss by the log-probability of one token."""
    above, below = (addends(_moved(step, place, by), formula, mode) for by in (STEP, -STEP))
    return math.fsum(a - b for a, b in zip(above, below, strict=True)) / (2 * STEP)


def _moved(step: Step, place: tuple[int, int], by: float) -> Step:
    changed = [list(answer) for answer in step]
    changed[place[0]][place[1]] = replace(changed[place[0]][place[1]], moved=by)
    return changed


def assert_agrees(algorithm: AlgorithmConfig, step: Step, formula: Formula) -> None:
    """The objective has the value of the formula and its slopes, 0 on untrained tokens too."""
    got = measure(algorithm, step)
    mode = algorithm.loss_agg_mode
    assert got.loss == pytest.approx(math.fsum(addends(step, formula, mode)), rel=1e-9, abs=1e-12)
    for row, answer in enumerate(step):
        wanted = [slope_at(step, (row, place), formula, mode) for place in range(len(answer))]
        assert got.gradient[row] == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def token_by_token(loss: Callable[[Token], float]) -> Formula:
    """The formula of a loss that looks at one token at a time."""
    return lambda answers: [[loss(token) for token in answer] for answer in answers]


def on_ranks(size: int, job: Callable[[int, Gather], Found]) -> list[Found]:
    """Run a job as so many ranks, one thread each, whose `gather` waits for all of them.

    Args:
        size: number of ranks.
        job: of a rank and its gather.

    Returns:
        What each rank's job returned.
    """
    barrier, parts = Barrier(size, timeout=240), [torch.empty(0)] * size

    def gather_as(rank: int) -> Gather:
        def gather(own_N: Tensor) -> Tensor:
            parts[rank] = own_N.double()
            barrier.wait()
            whole_N = torch.cat(parts)
            barrier.wait()
            return whole_N

        return gather

    with ThreadPoolExecutor(max_workers=size) as pool:
        return list(pool.map(lambda rank: job(rank, gather_as(rank)), range(size)))


def config_of(name: str, **settings: Any) -> AlgorithmConfig:
    """The loss with the aggregation that its row fixes."""
    mode = POLICY_LOSSES.find(name).loss_agg_mode
    return AlgorithmConfig(loss_mode=name, **({"loss_agg_mode": mode} if mode else {}), **settings)
