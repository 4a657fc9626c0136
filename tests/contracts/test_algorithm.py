"""The contract of an algorithm part: run it on your own with `-k <registered name>`.

Every advantage estimator, policy loss and KL estimator is checked, plugins of other people too.
Covered: shapes and types, finiteness, independence of the order and of
the micro-batches, the sign of the gradient, honest column declarations. Not covered: that the
formula is the paper's; a part brings its own worked numbers for that.
"""

import inspect

import pytest
import torch

from engines.algorithms.advantage import advantages
from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rows.algorithm import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

LENGTHS = [3, 5, 4, 2, 6, 3]
SCORES_B = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 1.0])
GROUP_B = torch.tensor([0, 0, 1, 1, 1, 0])

every_estimator = pytest.mark.parametrize("name", ADVANTAGES.names())
every_loss = pytest.mark.parametrize("name", POLICY_LOSSES.names())
every_kl = pytest.mark.parametrize("name", KL_ESTIMATORS.names())


def algorithm_with(**parts: str) -> AlgorithmConfig:
    algorithm = AlgorithmConfig(**parts)
    check_parts(algorithm)
    return algorithm


def make_batch(name: str, advantage_B: list[float]) -> TokenBatch:
    """Only the columns that the loss declares; the first token of each sequence is the prompt."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    mask_T = torch.cat([torch.tensor([0.0] + [1.0] * (n - 1)) for n in LENGTHS])
    bare = TokenBatch(
        torch.ones(num_tokens, dtype=torch.int64),
        torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        {"loss_mask": mask_T},
    )
    logprobs_T = -torch.rand(num_tokens, generator=generator) - 0.1
    known = {
        "advantages": torch.tensor(advantage_B)[bare.sequence_index_T] * mask_T,
        "rollout_logprobs": logprobs_T * mask_T,
        "ref_logprobs": logprobs_T * mask_T,
        "old_logprobs": logprobs_T * mask_T,
    }
    declared = {*POLICY_LOSSES.find(name).columns, "old_logprobs"}
    return bare.with_columns(**{key: known[key] for key in declared})


def counts_of(batch: TokenBatch) -> GlobalCounts:
    return GlobalCounts(int(batch.columns["loss_mask"].sum()), batch.num_sequences)


def gradient(name: str, batch: TokenBatch, counts: GlobalCounts, shift: float = 0.0):
    leaf_T = (batch.columns["old_logprobs"] + shift).requires_grad_()
    outputs = ModelOutputs(leaf_T, entropy_T=torch.ones_like(leaf_T))
    result = policy_loss_fn(algorithm_with(loss_mode=name), 8)(outputs, batch, counts)
    result.loss.backward()
    assert leaf_T.grad is not None
    return leaf_T.grad, result


@every_estimator
def test_an_estimator_returns_one_finite_number_per_sample(name):
    got = advantages(algorithm_with(adv_estimator=name), SCORES_B, GROUP_B)
    assert got.shape == SCORES_B.shape
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()


@every_estimator
def test_an_estimator_ranks_within_a_group(name):
    got = advantages(algorithm_with(adv_estimator=name), SCORES_B, GROUP_B)
    assert got[4] > got[3]
    assert got[0] > got[1]


@every_estimator
def test_an_estimator_does_not_depend_on_the_order(name):
    algorithm = algorithm_with(adv_estimator=name)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(
        advantages(algorithm, SCORES_B[order], GROUP_B[order]),
        advantages(algorithm, SCORES_B, GROUP_B)[order],
    )


@pytest.mark.parametrize(
    "name", [n for n in ADVANTAGES.names() if ADVANTAGES.find(n).group_relative]
)
def test_a_group_relative_estimator_is_silent_on_equal_scores(name):
    got = advantages(algorithm_with(adv_estimator=name), torch.full((6,), 0.1), GROUP_B)
    assert not got.any()


@every_loss
def test_a_loss_pushes_along_the_advantage(name):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    gradient_T, _ = gradient(name, batch, counts_of(batch))
    trained_T = batch.columns["loss_mask"] > 0
    signs_T = batch.columns["advantages"][trained_T].sign()
    assert torch.equal(gradient_T[trained_T].sign(), -signs_T)
    assert not gradient_T[~trained_T].any()


@every_loss
def test_a_loss_without_advantage_has_no_gradient(name):
    batch = make_batch(name, [0.0] * 6)
    gradient_T, _ = gradient(name, batch, counts_of(batch))
    assert not gradient_T.any()


@every_loss
@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_a_loss_stays_finite_far_from_the_old_policy(name, shift):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    gradient_T, result = gradient(name, batch, counts_of(batch), shift)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(gradient_T).all()


@every_loss
def test_a_loss_does_not_depend_on_the_micro_batches(name):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    counts = counts_of(batch)
    _, whole = gradient(name, batch, counts, 0.1)
    parts = [gradient(name, batch.select(s), counts, 0.1)[1] for s in ([5, 0], [3], [1, 4, 2])]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), abs=1e-6)
    for key, value in whole.metrics.items():
        total = sum(p.metrics[key].item() for p in parts)
        assert total == pytest.approx(value.item(), abs=1e-6), key


@every_kl
@pytest.mark.parametrize("suffix", ["", "+"])
def test_a_kl_estimate_is_zero_where_the_models_agree(name, suffix):
    logprobs_T = torch.tensor([-0.1, -3.0])
    algorithm = algorithm_with(kl_loss_type=name + suffix)
    assert algorithm.kl_loss_type == name + suffix
    got = KL_ESTIMATORS.load(name)(logprobs_T, logprobs_T)
    assert got.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS])
def test_every_part_states_its_source_and_formula(table):
    for name in table.names():
        assert table.find(name).paper.strip(), name
        assert inspect.getdoc(table.load(name)), name
