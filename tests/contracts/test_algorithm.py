"""The contract of an algorithm part: run it on your own with `-k <registered name>`.

Every advantage estimator, policy loss and KL estimator is checked, plugins of other people too.
Covered: shapes and types, finiteness, independence of the order and of
the micro-batches, the sign of the gradient, honest column declarations. Not covered: that the
formula is the paper's; a part brings its own worked numbers for that.
"""

import inspect
from collections.abc import Sequence

import pytest
import torch
from rlhf.testing.algorithm_samples import pack

from engines.algorithms.advantage import advantages
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rows.algorithm import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

LENGTHS = [3, 5, 4, 2, 6, 3]
SCORES_B = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
GROUP_B = torch.tensor([0, 0, 1, 1, 1, 0])
BETWEEN_GROUPS_B = torch.tensor([3.0, 3.0, -1.0, -1.0, -1.0, 3.0], dtype=torch.float64)
"""Equal within each group, different between them."""

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


def scored_batch(name: str) -> TokenBatch:
    """What the estimator declares and no more; numbers that fit any meaning, such as -1 < x < 0."""
    row = ADVANTAGES.find(name)
    generator = torch.Generator().manual_seed(1)
    batch = pack([n - 1 for n in LENGTHS])
    drawn = {column: -torch.rand(batch.num_tokens, generator=generator) for column in row.columns}
    if "sum_pi_squared" in drawn:
        drawn["sum_pi_squared"] = drawn["sum_pi_squared"].abs()
    rows = {each: torch.rand(batch.num_sequences, generator=generator) for each in row.rows}
    return batch.with_columns(**drawn).with_rows(**rows)


def estimated(
    name: str, scores_B: torch.Tensor = SCORES_B, order: Sequence[int] | None = None
) -> torch.Tensor:
    """(T,) advantages of outcome rewards; of the batch in another order, put back."""
    batch, order = scored_batch(name), list(range(len(LENGTHS))) if order is None else order
    chosen = torch.tensor(order)
    shuffled = batch.select(order)
    mask_T = shuffled.columns["loss_mask"] > 0
    rewards_T = on_last_token(scores_B[chosen], mask_T, shuffled)
    algorithm = algorithm_with(adv_estimator=name)
    found = advantages(algorithm, shuffled, rewards_T, GROUP_B[chosen]).advantages_T
    back = torch.empty_like(found)
    back[batch.token_index_T(order)] = found
    return back


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
        "uniform": torch.rand(num_tokens, generator=generator, dtype=torch.float64),
    }
    declared = {*POLICY_LOSSES.find(name).columns, "old_logprobs"}
    return bare.with_columns(**{key: known[key] for key in declared})


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
    got_T, batch = estimated(name), pack([n - 1 for n in LENGTHS])
    assert got_T.shape == (batch.num_tokens,)
    assert got_T.dtype == torch.float32
    assert torch.isfinite(got_T).all()
    assert not got_T[batch.columns["loss_mask"] == 0].any()


@every_estimator
def test_an_estimator_ranks_by_what_was_earned(name):
    """The last token of the best sample of a group does not fall below that of the worst."""
    last_B = torch.tensor(LENGTHS).cumsum(0) - 1
    low, high = estimated(name), estimated(name, SCORES_B + 5 * torch.eye(6)[4])
    assert high[last_B[4]] >= low[last_B[4]]
    assert high[last_B[4]] >= high[last_B[3]]


@every_estimator
def test_an_estimator_does_not_depend_on_the_order(name):
    shuffled = estimated(name, order=[5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(shuffled, estimated(name), rtol=1e-5, atol=1e-6)


@promising("shift")
def test_an_estimator_that_ignores_a_shift(name):
    shifted = estimated(name, SCORES_B + 7)
    torch.testing.assert_close(shifted, estimated(name), rtol=1e-4, atol=1e-5)


@promising("linear")
def test_an_estimator_that_passes_a_factor_on(name):
    torch.testing.assert_close(estimated(name, 3 * SCORES_B), 3 * estimated(name))


@promising("scale")
def test_an_estimator_that_ignores_a_factor(name):
    scaled = estimated(name, 3 * SCORES_B)
    torch.testing.assert_close(scaled, estimated(name), rtol=1e-4, atol=1e-5)


@promising("silent_groups", "silent_steps")
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6 + 0.1])
def test_an_estimator_that_is_silent_where_all_scores_are_equal(name, value):
    assert not estimated(name, torch.full((6,), value, dtype=torch.float64)).any()


@promising("silent_groups")
def test_an_estimator_that_is_silent_on_groups_of_equal_scores(name):
    assert not estimated(name, BETWEEN_GROUPS_B).any()
    one_group = torch.where(GROUP_B == 0, 0.1, SCORES_B)
    silent_T = (GROUP_B == 0)[pack([n - 1 for n in LENGTHS]).sequence_index_T]
    found = estimated(name, one_group)
    assert not found[silent_T].any()
    assert found[~silent_T].any()


@every_estimator
def test_an_estimator_that_lacks_a_column_says_which(name):
    row = ADVANTAGES.find(name)
    bare = pack([n - 1 for n in LENGTHS])
    rewards_T = torch.zeros(bare.num_tokens)
    for missing in (row.columns or row.rows)[:1]:
        with pytest.raises(ValueError, match=missing):
            advantages(algorithm_with(adv_estimator=name), bare, rewards_T, GROUP_B)


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
