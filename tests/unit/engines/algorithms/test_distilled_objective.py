"""A teacher's loss beside the algorithm's, against numbers worked out in plain Python."""

import math
from typing import Any

import pytest
import torch

from engines.algorithms.distillation import SAMPLED_LOGPROBS, TOPK_IDS, TOPK_LOGPROBS
from engines.algorithms.policy_objective import DistilledObjective, PolicyObjective, round_loss_fn
from engines.config.sections import RLConfig
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

P, Q = (0.5, 0.3), (0.4, 0.2)
"""Probabilities of the teacher's two likeliest tokens: its own, and the student's."""
SAMPLED = (0.4, 0.25)
"""Of the sampled token: the student's and the teacher's."""
ADVANTAGE, ENTROPY = 2.0, 0.9


def objective(**distillation: Any) -> PolicyObjective | DistilledObjective:
    section = {"path": "teacher", **distillation} if distillation else None
    return round_loss_fn(RLConfig.model_validate({"distillation": section}))


def batch() -> TokenBatch:
    """One token that is trained on behind one that is not."""
    given = TokenBatch.from_sequences([[1, 2]], loss_mask=[[0.0, 1.0]])
    return given.with_columns(
        **{
            "advantages": torch.tensor([0.0, ADVANTAGE]),
            TOPK_IDS: torch.tensor([[0, 0], [2, 3]]),
            TOPK_LOGPROBS: torch.tensor([[0.0, 0.0], P]).log().nan_to_num(neginf=0.0),
            SAMPLED_LOGPROBS: torch.tensor([0.0, math.log(SAMPLED[1])]),
        }
    )


def outputs() -> ModelOutputs:
    return ModelOutputs(
        torch.tensor([0.0, math.log(SAMPLED[0])], requires_grad=True),
        entropy_T=torch.tensor([0.0, ENTROPY]),
        topk_logprobs_TK=torch.tensor([[-1.0, -1.0], [math.log(q) for q in Q]], requires_grad=True),
    )


def measured(**distillation: Any) -> tuple[float, dict[str, float], ModelOutputs]:
    found = outputs()
    output = objective(**distillation)(found, batch(), GlobalCounts(1, 1))
    output.loss.backward()
    return output.loss.item(), {k: v.item() for k, v in output.metrics.items()}, found


def bucket() -> float:
    pairs = [*zip(P, Q, strict=True), (1 - sum(P), 1 - sum(Q))]
    return sum(p * math.log(p / q) for p, q in pairs)


def test_alone_it_is_the_teachers_loss_and_no_reward_is_read() -> None:
    loss, metrics, found = measured(weight=3.0)
    assert loss == pytest.approx(3 * bucket())
    assert metrics == {
        "distillation/loss": pytest.approx(bucket()),
        "distillation/teacher_mass": pytest.approx(sum(P)),
        "distillation/student_mass": pytest.approx(sum(Q)),
        "actor/entropy": pytest.approx(ENTROPY),
    }
    assert found.logprobs_T.grad is None, "nothing of the sampled token"
    assert found.topk_logprobs_TK is not None
    grad = found.topk_logprobs_TK.grad
    rest = (1 - sum(P)) / (1 - sum(Q))
    wanted = [3 * (rest * q - p) for p, q in zip(P, Q, strict=True)]
    assert grad is not None
    assert grad[1].tolist() == pytest.approx(wanted)
    assert grad[0].tolist() == [0.0, 0.0]


def test_beside_the_algorithm_each_has_its_weight() -> None:
    loss, metrics, found = measured(weight=3.0, policy_weight=0.5)
    # On-policy: the ratio is 1, and its slope by the log-probability too.
    assert loss == pytest.approx(3 * bucket() - 0.5 * ADVANTAGE)
    assert metrics["actor/pg_loss"] == pytest.approx(-ADVANTAGE)
    assert found.logprobs_T.grad is not None
    assert found.logprobs_T.grad.tolist() == pytest.approx([0.0, -0.5 * ADVANTAGE])


def test_an_estimate_reads_the_sampled_token_alone() -> None:
    d = math.log(SAMPLED[0] / SAMPLED[1])
    loss, metrics, found = measured(loss="k3+")
    assert loss == pytest.approx(math.exp(-d) - 1 + d)
    assert "distillation/teacher_mass" not in metrics
    assert found.topk_logprobs_TK is not None
    assert found.topk_logprobs_TK.grad is None
    assert found.logprobs_T.grad is not None
    assert found.logprobs_T.grad[1].item() == pytest.approx(d), "the gradient of k2"


@pytest.mark.parametrize(
    ("settings", "column"), [({"weight": 1.0}, TOPK_IDS), ({"loss": "k2"}, None), ({}, None)]
)
def test_it_asks_the_model_for_what_it_reads(settings: dict[str, Any], column: str | None) -> None:
    readouts = objective(**settings).readouts
    assert (readouts.logprobs_of, readouts.entropy) == (column, True)


def test_without_a_teacher_it_is_the_algorithms_own() -> None:
    assert isinstance(objective(), PolicyObjective)
