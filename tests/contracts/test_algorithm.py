"""The contract of an algorithm part: run it on your own with `-k <registered name>`.

Every advantage estimator, policy loss and KL estimator is checked, plugins of other people too.
Covered: shapes and types, finiteness, independence of the order, of untrained tokens and of the
micro-batches, the properties that a row declares, the sign of the gradient, honest column
declarations. Not covered: that the formula is the paper's; a part brings its own worked numbers
for that.
"""

import inspect
from dataclasses import replace

import pytest
import torch
from rlhf.testing.estimator_steps import (
    BETWEEN_GROUPS_B,
    GROUP_B,
    SCORES_B,
    bare_step,
    estimate_step,
    estimated,
    step_of,
)

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.types import GlobalCounts, ModelOutputs, TokenBatch
from infra.plugins import import_external_modules

if broken := import_external_modules():  # else what they would have registered is never asked for
    raise ImportError("; ".join(map(str, broken)))

PROPERTIES = {"shift", "linear", "scale", "silent_groups", "silent_steps"}

every_estimator = pytest.mark.parametrize("name", ADVANTAGES.names())
every_loss = pytest.mark.parametrize("name", POLICY_LOSSES.names())
every_kl = pytest.mark.parametrize("name", KL_ESTIMATORS.names())


def algorithm_with(**parts: str) -> AlgorithmConfig:
    """With the one aggregation that a loss may demand."""
    loss = POLICY_LOSSES.find(parts.get("loss_mode", "vanilla"))
    algorithm = AlgorithmConfig.model_validate(
        {"loss_agg_mode": loss.loss_agg_mode or "token-mean", **parts}
    )
    check_parts(algorithm)
    return algorithm


def promising(*properties: str) -> pytest.MarkDecorator:
    """Estimators whose row declares one of the properties."""
    names = [n for n in ADVANTAGES.names() if {*properties} & {*ADVANTAGES.find(n).properties}]
    return pytest.mark.parametrize("name", names)


def make_batch(name: str, advantage_B: list[float]) -> TokenBatch:
    """Only the columns that the loss declares; one it has a name of its own for is uniform."""
    generator, bare = torch.Generator().manual_seed(0), bare_step()
    mask_T = bare.columns["loss_mask"]
    uniform_T = torch.rand(bare.num_tokens, generator=generator, dtype=torch.float64)
    logprobs_T = (-uniform_T.float() - 0.1) * mask_T
    known = {
        "advantages": torch.tensor(advantage_B)[bare.sequence_index_T] * mask_T,
        "rollout_logprobs": logprobs_T,
        "ref_logprobs": logprobs_T,
        "old_logprobs": logprobs_T,
    }
    declared = {*POLICY_LOSSES.find(name).columns, "old_logprobs"}
    return bare.with_columns(**{key: known.get(key, uniform_T.flip(0)) for key in declared})


def counts_of(name: str, batch: TokenBatch) -> GlobalCounts:
    loss_fn = policy_loss_fn(algorithm_with(loss_mode=name), 8)
    extras = loss_fn.extras(batch, lambda own_N: own_N.double())
    num = batch.num_sequences
    return GlobalCounts(int(batch.columns["loss_mask"].sum()), num, num, extras)


def gradient(name: str, batch: TokenBatch, counts: GlobalCounts, shift: float = 0.0):
    leaf_T = (batch.columns["old_logprobs"] + shift).requires_grad_()
    outputs = ModelOutputs(leaf_T, entropy_T=torch.ones_like(leaf_T))
    result = policy_loss_fn(algorithm_with(loss_mode=name), 8)(outputs, batch, counts)
    result.loss.backward()
    assert leaf_T.grad is not None
    return leaf_T.grad, result


@every_estimator
def test_an_estimator_returns_one_finite_number_per_token(name):
    mask_T = bare_step().columns["loss_mask"] > 0
    for scores_B in (SCORES_B, 1e6 * SCORES_B, torch.zeros(6, dtype=torch.float64)):
        found_T = estimated(name, scores_B)
        assert found_T.shape == mask_T.shape
        assert found_T.dtype == torch.float32
        assert torch.isfinite(found_T).all()
        assert not found_T[~mask_T].any()


@every_estimator
@pytest.mark.parametrize("masks", [[[0, 1, 1]], [[0, 1], [0, 0, 0], [0, 1, 1]], [[0], [0, 0]]])
def test_estimator_handles_lone_and_untrained_samples(name, masks):
    size = len(masks)
    batch, group_B = step_of(name, masks), torch.arange(size) // 2
    for truncated_B in (torch.zeros(size).bool(), torch.ones(size).bool()):
        found = estimate_step(name, batch, SCORES_B[:size], group_B, truncated_B)
        assert torch.isfinite(found.advantages_T).all()
        assert not found.advantages_T[batch.columns["loss_mask"] == 0].any()


@every_estimator
def test_an_estimator_ranks_by_what_was_earned(name):
    """The last token of the best sample is not below the worst one's; nor is it for more score."""
    worst, best = bare_step().cu_seqlens[4:6] - 1  # of group 1: scores 0.0 and 2.0
    raised_B = SCORES_B + torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 0.0])
    low_T, high_T = estimated(name), estimated(name, raised_B)
    assert high_T[best] >= low_T[best]
    assert high_T[best] >= high_T[worst]


@every_estimator
def test_an_estimator_does_not_depend_on_the_order(name):
    shuffled_T = estimated(name, order=[5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(shuffled_T, estimated(name), rtol=1e-5, atol=1e-6)


@every_estimator
def test_an_estimator_does_not_look_at_untrained_tokens(name):
    batch = step_of(name)
    mask_T = batch.columns["loss_mask"] > 0
    other = {
        column: torch.where(mask_T, batch.columns[column], 7 * batch.columns[column])
        for column in ADVANTAGES.find(name).columns
    }
    assert torch.equal(estimated(name, batch=batch.with_columns(**other)), estimated(name))


@every_estimator
def test_selecting_estimator_returns_mask_of_trained_samples(name):
    batch = step_of(name)
    found = estimate_step(name, batch, SCORES_B, GROUP_B, torch.zeros(6).bool())
    assert (found.kept_B is not None) is ADVANTAGES.find(name).selects
    if found.kept_B is not None:
        assert (found.kept_B.dtype, found.kept_B.shape) == (torch.bool, (6,))
        assert not found.advantages_T[~found.kept_B[batch.sequence_index_T]].any()


@promising("shift")
def test_an_estimator_that_ignores_a_shift(name):
    shifted_T = estimated(name, SCORES_B + 7)
    torch.testing.assert_close(shifted_T, estimated(name), rtol=1e-4, atol=1e-5)


@promising("linear")
def test_an_estimator_that_passes_a_factor_on(name):
    torch.testing.assert_close(estimated(name, 3 * SCORES_B), 3 * estimated(name))


@promising("scale")
def test_an_estimator_that_ignores_a_factor(name):
    scaled_T = estimated(name, 3 * SCORES_B)
    torch.testing.assert_close(scaled_T, estimated(name), rtol=1e-4, atol=1e-5)


@promising("silent_groups", "silent_steps")
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6 + 0.1])
def test_an_estimator_that_is_silent_where_all_scores_are_equal(name, value):
    assert not estimated(name, torch.full((6,), value, dtype=torch.float64)).any()
    # Without groups a step is one group.
    if ADVANTAGES.find(name).group_relative:
        assert not estimated(name, value * BETWEEN_GROUPS_B).any()


@promising("silent_groups")
def test_an_estimator_that_is_silent_on_groups_of_equal_scores(name):
    silent_T = (GROUP_B == 0)[bare_step().sequence_index_T]
    found_T = estimated(name, torch.where(GROUP_B == 0, 0.1, SCORES_B))
    assert not found_T[silent_T].any()
    assert found_T[~silent_T].any()


@every_estimator
def test_an_estimator_that_lacks_a_column_says_which(name):
    row, whole = ADVANTAGES.find(name), step_of(name)
    for missing in {*row.columns, *row.rows}:
        columns = {key: value for key, value in whole.columns.items() if key != missing}
        rows = {key: value for key, value in whole.rows.items() if key != missing}
        with pytest.raises(ValueError, match=missing):
            estimated(name, batch=replace(whole, columns=columns, rows=rows))


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS])
def test_only_estimators_promise_and_only_what_is_checked(table):
    for row in table.rows:
        assert {*row.properties} <= (PROPERTIES if table is ADVANTAGES else set()), row.name


@every_estimator
def test_an_estimator_promises_what_is_known(name):
    assert {*ADVANTAGES.find(name).properties} <= PROPERTIES


@every_loss
def test_a_loss_pushes_along_the_advantage(name):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    gradient_T, _ = gradient(name, batch, counts_of(name, batch))
    trained_T = batch.columns["loss_mask"] > 0
    signs_T = batch.columns["advantages"][trained_T].sign()
    assert torch.equal(gradient_T[trained_T].sign(), -signs_T)
    assert not gradient_T[~trained_T].any()


@every_loss
def test_a_loss_without_advantage_has_no_gradient(name):
    batch = make_batch(name, [0.0] * 6)
    gradient_T, _ = gradient(name, batch, counts_of(name, batch))
    assert not gradient_T.any()


@every_loss
@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_a_loss_stays_finite_far_from_the_old_policy(name, shift):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    gradient_T, result = gradient(name, batch, counts_of(name, batch), shift)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(gradient_T).all()


@every_loss
def test_a_loss_does_not_depend_on_the_micro_batches(name):
    batch = make_batch(name, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    counts = counts_of(name, batch)
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
