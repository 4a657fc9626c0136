"""Differences between sampler and trainer, by hand, and the bound that stops a run."""

import math

import pytest
import torch

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.errors import WeightSyncError
from engines.trainers.mismatch import LOGPROB_MAX, MeasuredObjective, check_mismatch
from engines.types import GlobalCounts, ModelOutputs, TokenBatch, TrainMetrics

OBJECTIVE = MeasuredObjective(policy_loss_fn(AlgorithmConfig(), 4))


def test_differences_of_probabilities_by_hand() -> None:
    batch = TokenBatch.from_sequences(
        [[1, 2, 3]],
        loss_mask=[[0, 1, 1]],
        advantages=[[0, 1, 1]],
        rollout_logprobs=[[0, math.log(0.5), math.log(0.25)]],
    )
    logprobs_T = torch.tensor([9.0, math.log(0.6), math.log(0.2)], requires_grad=True)
    output = OBJECTIVE(ModelOutputs(logprobs_T), batch, GlobalCounts(2, 1))
    assert output.metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.075, abs=1e-6)
    assert output.maxima["training/rollout_probs_diff_max"] == pytest.approx(0.1, abs=1e-6)
    largest = max(math.log(0.6 / 0.5), math.log(0.25 / 0.2))
    assert output.maxima[LOGPROB_MAX] == pytest.approx(largest, abs=1e-6)
    # The measurement has no gradient: the loss is the objective's, -mean(ratio x advantage).
    output.loss.backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([0, -0.5, -0.5])


def test_recomputed_logprobs_are_compared_where_the_batch_has_them() -> None:
    batch = TokenBatch.from_sequences(
        [[1, 2]],
        loss_mask=[[0, 1]],
        advantages=[[0, 1]],
        rollout_logprobs=[[0, math.log(0.5)]],
        old_logprobs=[[0, math.log(0.5)]],
    )
    outputs = ModelOutputs(torch.tensor([0.0, math.log(0.9)], requires_grad=True))
    output = OBJECTIVE(outputs, batch, GlobalCounts(1, 1))
    assert output.maxima["training/rollout_probs_diff_max"] == 0
    assert output.maxima[LOGPROB_MAX] == 0


def test_a_difference_above_the_bound_stops_the_run() -> None:
    updates = [TrainMetrics(0, 0, 0, 1, {LOGPROB_MAX: value}) for value in (1e-6, 2e-3)]
    check_mismatch(updates, None)
    check_mismatch(updates, 1e-2)
    check_mismatch([], 1e-9)
    with pytest.raises(WeightSyncError, match=r"is 0\.002, above max_logprob_diff 0\.001"):
        check_mismatch(updates, 1e-3)
