"""Differences between sampler and trainer, by hand, and the bound that stops a run."""

import math

import pytest
import torch

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig, MismatchConfig
from engines.errors import RolloutError, WeightSyncError
from engines.trainers.mismatch import (
    LOGPROB_MAX,
    LOGPROB_MEAN,
    MeasuredObjective,
    MismatchGate,
    check_versions,
)
from engines.types import Completion, GlobalCounts, ModelOutputs, TokenBatch

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


def test_mismatch_compares_recomputed_logprobs_if_present() -> None:
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


def found(mean: float, largest: float) -> dict[str, float]:
    return {LOGPROB_MEAN: mean, LOGPROB_MAX: largest}


def test_a_difference_above_a_bound_stops_the_run() -> None:
    gate = MismatchGate(mean=1e-4, max=1e-3)
    gate.check([])
    gate.check([found(2e-4, 1e-3), found(0, 0)])
    with pytest.raises(WeightSyncError, match=r"_mean is 0\.00015, above rl.mismatch.mean 0\.0001"):
        gate.check([found(2e-4, 1e-3), found(1e-4, 0)])
    with pytest.raises(WeightSyncError, match=r"_max is 0\.002, above rl.mismatch.max 0\.001"):
        gate.check([found(0, 0), found(0, 2e-3), found(0, 0)])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("enable", [True, False])
def test_what_is_no_number_never_passes(broken: float, enable: bool) -> None:
    gate = MismatchGate.of(MismatchConfig(enable=enable, mean=1e9, max=1e9), "float32")
    for bad in (found(broken, 0), found(0, broken)):
        with pytest.raises(WeightSyncError, match=f"is {broken}"):
            gate.check([found(0, 0), bad, found(0, 0)])


def test_the_bounds_are_those_of_the_coarser_dtype() -> None:
    default = MismatchConfig()
    assert MismatchGate.of(default, "float32", "float32") == MismatchGate(1e-4, 1e-2)
    assert MismatchGate.of(default, "float32", "bfloat16") == MismatchGate(0.1, 10)
    assert MismatchGate.of(default, "bfloat16", "fp8") == MismatchGate(0.5, 20)
    assert MismatchGate.of(MismatchConfig(mean=0.2), "bfloat16") == MismatchGate(0.2, 10)


def test_tokens_of_other_weights_are_named() -> None:
    def completion(*versions: int) -> Completion:
        return Completion("round=1/step=2/prompt=0", 3, (5, 6), (-1.0, -1.0), versions, "stop")

    check_versions([[completion(4, 4)]], 4)
    for versions, shown in (((4, 5), r"\[4, 5\]"), ((5, 5), r"\[5\]"), ((), r"\[\]")):
        with pytest.raises(RolloutError, match=f"prompt=0 sample 3: 2 tokens of versions {shown}"):
            check_versions([[completion(4, 4), completion(*versions)]], 4)
