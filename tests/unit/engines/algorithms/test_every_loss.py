"""What every policy loss keeps: one gradient however a step is cut, REINFORCE at ratio 1, silence
without advantage or trained token, and finite numbers far from the old policy."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rlhf.testing.loss_steps import (
    MAX_NEW_TOKENS,
    PROMPT,
    Step,
    Token,
    batch_of,
    column_of,
    config_of,
    counts_of,
    measure,
    on_ranks,
    random_step,
)
from torch import Tensor

from engines.algorithms.parts import Gather
from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows import POLICY_LOSSES
from engines.config.rules.algorithm import check_algorithm
from engines.config.sections import RLConfig
from engines.types import ModelOutputs, TokenBatch
from infra.errors import ConfigError

SHARE = 0.2
OPTIONS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": SHARE, "clip_cov_lb": -99.0, "clip_cov_ub": 99.0},
    "kl_cov": {"kl_cov_ratio": SHARE},
}
"""So that a fifth of the tokens is taken."""
PULLED = ("dro", "kl_cov")
"""Losses that pull towards the old policy where there is no advantage too."""

every_loss = pytest.mark.parametrize("name", POLICY_LOSSES.names())


def config_with(name: str, **settings: Any) -> AlgorithmConfig:
    return config_of(name, options=OPTIONS.get(name, {}), **settings)


def trained(step: Step) -> list[Token]:
    return [token for answer in step for token in answer if token.trained]


def on_policy(step: Step) -> Step:
    return [[replace(token, old=token.policy) for token in answer] for answer in step]


@dataclass(frozen=True)
class Share:
    """What one rank, or all of them, found: the loss, its gradient (T,), and the metrics."""

    loss: float
    gradient_T: Tensor
    metrics: dict[str, float]


def share_of(
    algorithm: AlgorithmConfig,
    batch: TokenBatch,
    logprobs_T: Tensor,
    micro_batches: Sequence[Sequence[int]],
    gather: Gather,
) -> Share:
    """What one rank does: a pre-pass over all it has, then one micro-batch after the other."""
    objective = policy_loss_fn(algorithm, MAX_NEW_TOKENS)
    own = [row for micro_batch in micro_batches for row in micro_batch]
    extras = dict(objective.extras(batch.select(own), gather))
    loss, gradient_T, metrics = 0.0, torch.zeros_like(logprobs_T), dict[str, float]()
    for rows in micro_batches:
        place_T = batch.token_index_T(rows)
        leaf_T = logprobs_T[place_T].requires_grad_()
        result = objective(ModelOutputs(leaf_T), batch.select(rows), counts_of(batch, extras))
        result.loss.backward()
        assert leaf_T.grad is not None
        gradient_T[place_T] = leaf_T.grad
        loss += result.loss.item()
        for key, value in result.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + value.item()
    return Share(loss, gradient_T, metrics)


def sum_of(shares: Sequence[Share]) -> Share:
    metrics = {key: sum(share.metrics[key] for share in shares) for key in shares[0].metrics}
    gradient_T = torch.stack([share.gradient_T for share in shares]).sum(dim=0)
    return Share(sum(share.loss for share in shares), gradient_T, metrics)


def cut(
    num_rows: int, num_ranks: int, num_micro: int, source: random.Random
) -> list[list[list[int]]]:
    """Rows by rank and micro-batch: each has one at least, the rest falls anywhere."""
    rows = source.sample(range(num_rows), num_rows)
    plan: list[list[list[int]]] = [[[] for _ in range(num_micro)] for _ in range(num_ranks)]
    places = [micro_batch for rank in plan for micro_batch in rank]
    for index, row in enumerate(rows):
        (places[index] if index < len(places) else source.choice(places)).append(row)
    return plan


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("num_micro", [1, 7])
def test_loss_and_gradient_do_not_depend_on_step_partition(
    name: str, dtype: torch.dtype, num_ranks: int, num_micro: int
) -> None:
    algorithm, tolerance = config_with(name), 1e-12 if dtype == torch.float64 else 1e-5
    step = random_step(3, 40, farthest=4.0)
    batch, logprobs_T = batch_of(step, dtype), column_of(step, "policy", dtype)
    alone = share_of(algorithm, batch, logprobs_T, [range(40)], lambda own_N: own_N.double())
    assert alone.gradient_T.norm() > 0.01
    assert not alone.gradient_T[batch.columns["loss_mask"] == 0].any()
    for seed in range(3):
        plan = cut(len(step), num_ranks, num_micro, random.Random(seed))

        def job(rank: int, gather: Gather, plan: list[list[list[int]]] = plan) -> Share:
            return share_of(algorithm, batch, logprobs_T, plan[rank], gather)

        got = sum_of(on_ranks(num_ranks, job))
        assert got.loss == pytest.approx(alone.loss, rel=tolerance)
        gap_T = got.gradient_T - alone.gradient_T
        assert gap_T.norm() <= tolerance * alone.gradient_T.norm()
        # Metrics that count are float32 shares whatever the loss is.
        assert got.metrics == pytest.approx(alone.metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_steps_above_have_tokens_that_a_prepass_takes(name: str) -> None:
    step = random_step(3, 40, farthest=4.0)
    num_tokens = len(trained(step))
    metric = {"clip_cov": "actor/cov_clipfrac", "kl_cov": "actor/cov_klfrac"}[name]
    got = measure(config_with(name), step).metrics[metric]
    assert got == pytest.approx(int(SHARE * num_tokens) / num_tokens)


def reinforce_gradients(step: Step, mode: str) -> list[float]:
    """-A of each trained token, over the plain counts of the mode."""
    num_tokens, num_answers = len(trained(step)), sum(bool(trained([each])) for each in step)
    found = []
    for answer in step:
        divisor = {
            "token-mean": num_tokens,
            "token-sum": 1,
            "seq-mean-token-sum": num_answers,
            "seq-mean-token-mean": num_answers * len(trained([answer])),
            "seq-mean-token-sum-norm": num_answers * MAX_NEW_TOKENS,
        }[mode]
        found += [-t.advantage / divisor if t.trained else 0.0 for t in answer]
    return found


def modes_of(name: str) -> list[str]:
    fixed = POLICY_LOSSES.find(name).loss_agg_mode
    others = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    return [fixed] if fixed else [*others, "seq-mean-token-mean"]


@every_loss
def test_at_ratio_1_the_gradient_is_that_of_reinforce(name: str) -> None:
    """But for tokens that clip_cov takes; geo_mean has one advantage for an answer."""
    step = on_policy(random_step(4, 12, one_advantage=name == "geo_mean"))
    num_taken = int(SHARE * len(trained(step))) if name == "clip_cov" else 0
    for mode in modes_of(name):
        algorithm = config_with(name).model_copy(update={"loss_agg_mode": mode})
        got = [slope for answer in measure(algorithm, step).gradient for slope in answer]
        pairs = zip(got, reinforce_gradients(step, mode), strict=True)
        different = [ours for ours, theirs in pairs if ours != pytest.approx(theirs, rel=1e-12)]
        assert different == [0.0] * num_taken


@every_loss
def test_without_old_logprobs_a_batch_is_on_policy(name: str) -> None:
    step = on_policy(random_step(5, 12))
    objective, batch = policy_loss_fn(config_with(name), MAX_NEW_TOKENS), batch_of(step)
    names = objective.required_columns
    bare = replace(batch, columns={key: batch.columns[key] for key in names})
    assert ("old_logprobs" in names) == (name in ("clip_cov", "kl_cov"))
    found = []
    for each in (batch, bare):
        leaf_T = column_of(step, "policy").requires_grad_()
        extras = dict(objective.extras(each, lambda own_N: own_N.double()))
        objective(ModelOutputs(leaf_T), each, counts_of(each, extras)).loss.backward()
        found.append(leaf_T.grad)
    assert torch.equal(found[0], found[1])


@every_loss
def test_without_advantage_there_is_no_gradient(name: str) -> None:
    """But for the pull of dro and kl_cov, which is there as soon as the policy has moved."""
    step = [[replace(t, advantage=0.0) for t in answer] for answer in random_step(6, 12)]
    still = measure(config_with(name), on_policy(step)).gradient
    assert not any(slope for answer in still for slope in answer)
    moved = measure(config_with(name), step).gradient
    pushed = [bool(slope) for answer in moved for slope in answer]
    if name in PULLED:
        assert pushed == [token.trained for answer in step for token in answer]
    else:
        assert not any(pushed)


def far_step(advantage: float) -> Step:
    """80 nats up, down, and both in one answer; the near end is a probability of about 1."""
    up, down = Token(-1e-3, -80.0, advantage), Token(-80.0, -1e-3, advantage)
    return [[PROMPT, up, up], [PROMPT, down, down], [PROMPT, up, PROMPT, down], [up], [down]]


@every_loss
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_80_nats_away_everything_is_finite(name: str, advantage: float, dtype: torch.dtype) -> None:
    step = far_step(advantage)
    got = share_of(
        config_with(name), batch_of(step, dtype), column_of(step, "policy", dtype),
        [range(len(step))], lambda own_N: own_N.double(),
    )  # fmt: skip
    assert torch.isfinite(got.gradient_T).all()
    assert torch.isfinite(torch.tensor([got.loss, *got.metrics.values()])).all()


@every_loss
def test_sequences_without_a_trained_token_change_nothing(name: str) -> None:
    step, silent = random_step(7, 5), [[replace(t, trained=False) for t in far_step(5.0)[2]]]
    alone, among = measure(config_with(name), step), measure(config_with(name), [*step, *silent])
    assert among.loss == pytest.approx(alone.loss, rel=1e-12)
    assert among.gradient == [*alone.gradient, [0.0] * 4]
    assert among.metrics == pytest.approx(alone.metrics, rel=1e-12)
    nothing = measure(config_with(name), silent)
    assert (nothing.loss, nothing.gradient) == (0.0, [[0.0] * 4])


@every_loss
def test_an_aggregation_that_is_part_of_a_loss_has_to_be_set(name: str) -> None:
    algorithm = config_with(name)
    check_algorithm(RLConfig(algorithm=algorithm, group_size=2))
    other = algorithm.model_copy(update={"loss_agg_mode": "token-sum"})
    if POLICY_LOSSES.find(name).loss_agg_mode:
        with pytest.raises(ConfigError, match=r"loss_agg_mode: got token-sum"):
            check_algorithm(RLConfig(algorithm=other, group_size=2))
