"""The whole loss function: terms, gradients, splits, metrics."""

import pickle
import random

import pytest
import torch
from rlhf.testing.algorithm_samples import estimate_B
from torch import Tensor

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def make_batch(seed: int, num_sequences: int = 8, scores: list[float] | None = None) -> TokenBatch:
    """Sequences of 2 prompt tokens and 1 to 5 sampled ones; two groups; every column filled."""
    source = random.Random(seed)
    lengths = [2 + source.randint(1, 5) for _ in range(num_sequences)]

    def column(low: float, high: float) -> list[list[float]]:
        return [[0.0, 0.0] + [source.uniform(low, high) for _ in range(n - 2)] for n in lengths]

    scores = scores or [source.random() for _ in lengths]
    groups = [i % 2 for i in range(num_sequences)]
    values = estimate_B(AlgorithmConfig(), torch.tensor(scores), torch.tensor(groups)).tolist()
    return TokenBatch.from_sequences(
        [[1] * n for n in lengths],
        loss_mask=[[0.0, 0.0] + [1.0] * (n - 2) for n in lengths],
        advantages=[[0.0, 0.0] + [a] * (n - 2) for n, a in zip(lengths, values, strict=True)],
        old_logprobs=column(-2.0, -0.2),
        rollout_logprobs=column(-2.0, -0.2),
        ref_logprobs=column(-2.0, -0.2),
    )


def counts_of(batch: TokenBatch) -> GlobalCounts:
    return GlobalCounts(int(batch.columns["loss_mask"].sum()), batch.num_sequences)


def outputs_for(batch: TokenBatch, seed: int = 3) -> tuple[Tensor, ModelOutputs]:
    """Leaf logprobs near the old ones, and an entropy that depends on them."""
    generator = torch.Generator().manual_seed(seed)
    noise_T = 0.4 * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    leaf_T = (batch.columns["old_logprobs"].double() + noise_T).requires_grad_()
    return leaf_T, ModelOutputs(leaf_T, entropy_T=leaf_T.square() / 3)


FULL = AlgorithmConfig(
    use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.05, clip_ratio_high=0.28, kl_loss_type="k3"
)


@pytest.mark.parametrize("mode", MODES)
def test_permuted_splits_give_the_same_loss_metrics_and_gradient(mode):
    batch = make_batch(1)
    algorithm = FULL.model_copy(update={"loss_agg_mode": mode})
    loss_fn = policy_loss_fn(algorithm, max_new_tokens=5)
    whole_T, whole_outputs = outputs_for(batch)
    whole = loss_fn(whole_outputs, batch, counts_of(batch))
    whole.loss.backward()

    leaf_T, split_outputs = outputs_for(batch)
    position_T = torch.arange(batch.num_tokens)
    parts: list[LossOutput] = []
    for chosen in ([6, 1], [3], [0, 7, 5], [2, 4]):
        where_T = batch.with_columns(position=position_T).select(chosen).columns["position"]
        assert split_outputs.entropy_T is not None
        outputs = ModelOutputs(leaf_T[where_T], split_outputs.entropy_T[where_T])
        part = loss_fn(outputs, batch.select(chosen), counts_of(batch))
        part.loss.backward(retain_graph=True)
        parts.append(part)

    assert whole_T.grad is not None
    assert leaf_T.grad is not None
    torch.testing.assert_close(leaf_T.grad, whole_T.grad)
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        total = sum(p.metrics[name].item() for p in parts)
        assert total == pytest.approx(value.item(), abs=1e-6), name
    for name, value in whole.maxima.items():
        assert max(p.maxima[name].item() for p in parts) == pytest.approx(value.item()), name


def test_the_gradient_is_the_finite_difference():
    batch = make_batch(2)
    loss_fn = policy_loss_fn(FULL, max_new_tokens=5)
    counts = counts_of(batch)
    leaf_T, outputs = outputs_for(batch)
    loss_fn(outputs, batch, counts).loss.backward()
    assert leaf_T.grad is not None

    def value(logprobs_T: Tensor) -> float:
        return loss_fn(ModelOutputs(logprobs_T, logprobs_T.square() / 3), batch, counts).loss.item()

    step = 1e-6
    for t in range(batch.num_tokens):
        shift_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
        shift_T[t] = step
        base_T = leaf_T.detach()
        slope = (value(base_T + shift_T) - value(base_T - shift_T)) / (2 * step)
        assert leaf_T.grad[t].item() == pytest.approx(slope, abs=1e-6)


def test_second_formula_without_clipping():
    """Inside the clip range the loss is minus the mean of ratio times advantage."""
    batch = make_batch(4)
    loss_fn = policy_loss_fn(AlgorithmConfig(), max_new_tokens=5)
    logprobs_T = batch.columns["old_logprobs"] + 0.05
    got = loss_fn(ModelOutputs(logprobs_T), batch, counts_of(batch))
    rows = zip(
        batch.columns["loss_mask"].tolist(), batch.columns["advantages"].tolist(), strict=True
    )
    terms = [-(2.718281828459045**0.05) * a for m, a in rows if m]
    assert got.loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert got.metrics["actor/ppo_kl"].item() == pytest.approx(-0.05, rel=1e-5)
    assert got.metrics["actor/pg_clipfrac"].item() == 0.0


def test_a_better_sample_gets_likelier_and_a_worse_one_less():
    batch = make_batch(5, num_sequences=4, scores=[1.0, 0.0, 0.0, 1.0])
    leaf_T = batch.columns["old_logprobs"].clone().requires_grad_()
    policy_loss_fn(AlgorithmConfig(), 5)(
        ModelOutputs(leaf_T), batch, counts_of(batch)
    ).loss.backward()
    trained_T = batch.columns["loss_mask"] > 0
    assert leaf_T.grad is not None
    advantages_T = batch.columns["advantages"][trained_T]
    assert torch.equal(leaf_T.grad[trained_T].sign(), -advantages_T.sign())
    assert not leaf_T.grad[~trained_T].any()


def test_equal_rewards_give_no_gradient():
    batch = make_batch(6, scores=[0.1] * 8)
    leaf_T, outputs = outputs_for(batch)
    policy_loss_fn(AlgorithmConfig(), 5)(outputs, batch, counts_of(batch)).loss.backward()
    assert leaf_T.grad is not None
    assert not leaf_T.grad.any()


def test_without_old_logprobs_it_is_reinforce():
    batch = make_batch(7)
    columns = {k: v for k, v in batch.columns.items() if k != "old_logprobs"}
    on_policy = TokenBatch(batch.input_ids_T, batch.cu_seqlens, columns)
    leaf_T, outputs = outputs_for(batch)
    result = policy_loss_fn(AlgorithmConfig(), 5)(outputs, on_policy, counts_of(batch))
    result.loss.backward()
    mask_T, advantages_T = columns["loss_mask"].double(), columns["advantages"].double()
    want_T = -advantages_T * mask_T / mask_T.sum()
    assert leaf_T.grad is not None
    torch.testing.assert_close(leaf_T.grad, want_T)
    assert result.metrics["actor/ppo_kl"].item() == 0.0


def test_entropy_bonus_lowers_the_loss_and_kl_raises_it():
    batch = make_batch(8)
    _, outputs = outputs_for(batch)
    counts = counts_of(batch)
    plain = policy_loss_fn(AlgorithmConfig(), 5)(outputs, batch, counts)
    bonus = policy_loss_fn(AlgorithmConfig(entropy_coeff=0.5), 5)(outputs, batch, counts)
    kl = policy_loss_fn(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.2), 5)(
        outputs, batch, counts
    )
    entropy = plain.metrics["actor/entropy"].item()
    assert bonus.loss.item() == pytest.approx(plain.loss.item() - 0.5 * entropy)
    added = 0.2 * kl.metrics["actor/kl_loss"].item()
    assert added > 0
    assert kl.loss.item() == pytest.approx(plain.loss.item() + added)


def test_missing_columns_are_named():
    batch = TokenBatch.from_sequences([[1, 2]], loss_mask=[[0, 1]])
    loss_fn = policy_loss_fn(AlgorithmConfig(use_kl_loss=True), 5)
    assert loss_fn.required_columns == {"advantages", "loss_mask", "ref_logprobs"}
    with pytest.raises(ValueError, match=r"\['advantages', 'ref_logprobs'\]"):
        loss_fn(ModelOutputs(torch.zeros(2)), batch, GlobalCounts(1, 1))
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss_fn(AlgorithmConfig(entropy_coeff=0.1), 5)(
            ModelOutputs(torch.zeros(2)),
            batch.with_columns(advantages=torch.zeros(2)),
            GlobalCounts(1, 1),
        )


def test_the_loss_function_travels_by_pickle():
    loss_fn = policy_loss_fn(FULL, 5)
    batch = make_batch(9)
    _, outputs = outputs_for(batch)
    counts = counts_of(batch)
    again = pickle.loads(pickle.dumps(loss_fn))
    assert again == loss_fn
    assert again.readouts.entropy
    assert again(outputs, batch, counts).loss.item() == loss_fn(outputs, batch, counts).loss.item()
