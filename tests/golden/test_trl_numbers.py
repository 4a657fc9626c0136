"""Our losses and TRL's own code give the same numbers on the same inputs; so do KL and logprobs.

`trl_numbers.py` has asked TRL; what it found stands in `trl_numbers.json`. Losses and their
gradients are in float64 on both sides. What differs on purpose is said where it is undone, and
undone exactly. The advantages are in `test_trl_advantages.py`.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.loss_steps import config_of, counts_of
from transformers import AutoModelForCausalLM, Qwen3Config
from trl_golden import EXACT, FLOAT32, GOLDEN, assert_same, batch_of, by_answer, column_of
from trl_inputs import fill

from engines.algorithms.kl import K3_BEND, kl_estimate
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.supervised import SupervisedLoss
from engines.config.algorithm import AlgorithmConfig
from engines.training.model.logprobs import token_logprobs
from engines.types import ModelOutputs, TokenBatch

MAX_NEW_TOKENS = 8
# TRL bounds a bad token's ratio only where `delta` is set; our dual clip is always there.
NO_BOUND = 1e9
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": NO_BOUND}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
OF_ANSWERS, OF_SUMS = "seq-mean-token-mean", "seq-mean-token-sum"


def vanilla(mode: str, **settings: Any) -> AlgorithmConfig:
    return config_of("vanilla", loss_agg_mode=mode, **{**CLIP, **settings})


OURS = {
    "grpo_clip": vanilla(OF_ANSWERS),
    "grpo_delta": vanilla(OF_ANSWERS, clip_ratio_c=3.0),
    "grpo_kl": vanilla(OF_ANSWERS, **KL),
    "grpo_on_policy": vanilla(OF_ANSWERS, **KL),
    # TRL multiplies the KL by the ratio: at ratio 1 its value stays and its slope is our `+`.
    "grpo_corrected_kl": vanilla(OF_ANSWERS, **{**KL, "kl_loss_type": "k3+"}),
    "grpo_in_two": vanilla(OF_ANSWERS, **KL),
    "bnpo": vanilla("token-mean"),
    "bnpo_entropy": vanilla("token-mean", entropy_coeff=0.05),
    "dr_grpo": vanilla("seq-mean-token-sum-norm", **KL),
    "dapo": vanilla("token-mean"),
    "dapo_in_two": vanilla("token-mean", **KL),
    "luspo_token": vanilla(OF_SUMS),
    "gspo": config_of("gspo", **CLIP),
    "gspo_kl": config_of("gspo", **CLIP, **KL),
    # LUSPO is GSPO with the sum over an answer, which recipes cannot ask of ours.
    "luspo_sequence": AlgorithmConfig(loss_mode="gspo", loss_agg_mode=OF_SUMS, **CLIP),
    # TRL's upper bound is of the ratio itself, ours of its distance to 1; TRL has no lower one.
    "cispo": config_of("cispo", clip_ratio_low=1 - 1e-9, clip_ratio_high=0.25),
    "sapo": config_of("sapo", options={"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": config_of("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.3),
    "gmpo_kl": config_of("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.3, **KL),
    "rloo_single": vanilla(OF_SUMS),
}


def measure(
    algorithm: AlgorithmConfig, step: Mapping[str, Any], num_micro_batches: int = 1
) -> tuple[dict[str, float], list[list[float]], list[list[float]]]:
    """Metrics with the loss as `loss`, and the gradient by log-probability and by entropy."""
    batch, objective = batch_of(step), policy_loss_fn(algorithm, MAX_NEW_TOKENS)
    leaf_T = column_of(step, "logprobs").requires_grad_()
    entropy_T = column_of(step, "entropy").requires_grad_()
    totals: dict[str, float] = {}
    for own in torch.arange(batch.num_sequences).chunk(num_micro_batches):
        where_T = batch.token_index_T(own.tolist())
        outputs = ModelOutputs(leaf_T[where_T], entropy_T[where_T])
        result = objective(outputs, batch.select(own.tolist()), counts_of(batch))
        result.loss.backward()
        for name, value in {"loss": result.loss, **result.metrics}.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    assert leaf_T.grad is not None
    slopes_T = torch.zeros_like(entropy_T) if entropy_T.grad is None else entropy_T.grad
    return totals, by_answer(leaf_T.grad, batch), by_answer(slopes_T, batch)


@pytest.mark.parametrize("case", OURS)
def test_losses_and_gradients(case: str) -> None:
    theirs = GOLDEN["losses"][case]
    step = GOLDEN["steps"][theirs["inputs"]]
    num_micro_batches = 2 if case.endswith("_in_two") else 1
    ours, gradient, by_entropy = measure(OURS[case], step, num_micro_batches)
    assert ours["loss"] == pytest.approx(theirs["loss"], **EXACT)
    assert_same(gradient, theirs["gradient"], EXACT)
    if "entropy_gradient" in theirs:
        assert_same(by_entropy, theirs["entropy_gradient"], EXACT)
    # Of GSPO, TRL counts answers, ours tokens.
    if "clipped" in theirs and OURS[case].loss_mode != "gspo":
        assert ours["actor/pg_clipfrac"] == pytest.approx(theirs["clipped"], **FLOAT32)


def test_the_numbers_are_of_the_pinned_versions() -> None:
    pins = (
        Path(__file__).parents[1].joinpath("benchmarks", "requirements-trl.txt").read_text("utf-8")
    )
    pinned = dict(line.split("==") for line in pins.splitlines() if not line.startswith("#"))
    assert GOLDEN["versions"] == pinned


def test_every_case_is_compared_and_none_is_idle() -> None:
    apart = {"grpo_one_untrained", "rloo_on_policy"}
    assert GOLDEN["losses"].keys() == OURS.keys() | apart
    clipped = {case: row["clipped"] for case, row in GOLDEN["losses"].items() if "clipped" in row}
    assert {case for case, share in clipped.items() if not 0 < share < 1} == {
        "grpo_on_policy", "grpo_corrected_kl", "rloo_on_policy",
    }  # fmt: skip


def test_an_answer_without_a_trained_token_counts_for_trl_only() -> None:
    """TRL's mean is over all 6 answers; ours is over the 5 that are trained on."""
    theirs = GOLDEN["losses"]["grpo_one_untrained"]
    ours, gradient, _ = measure(OURS["grpo_clip"], GOLDEN["steps"]["one_untrained"])
    assert ours["loss"] * 5 / 6 == pytest.approx(theirs["loss"], **EXACT)
    assert_same([[x * 5 / 6 for x in row] for row in gradient], theirs["gradient"], EXACT)


def test_on_policy_rloo_is_reinforce() -> None:
    """TRL's ratio is of a whole answer: at ratio 1 each token has the slope of REINFORCE."""
    theirs, step = GOLDEN["losses"]["rloo_on_policy"], GOLDEN["steps"]["on_policy"]
    for algorithm in (config_of("reinforce", loss_agg_mode=OF_SUMS), vanilla(OF_SUMS)):
        assert_same(measure(algorithm, step)[1], theirs["gradient"], EXACT)
    # Its value is the mean advantage of an answer, once; ours counts it on each of its tokens.
    assert theirs["loss"] == pytest.approx(-statistics.mean(step["advantages"]), **EXACT)


def test_k3() -> None:
    theirs = GOLDEN["divergence"]
    logprobs_T = torch.full((len(theirs["distances"]),), -1.0, dtype=torch.float64)
    logprobs_T.requires_grad_()
    reference_T = -1.0 - torch.tensor(theirs["distances"], dtype=torch.float64)
    values_T = kl_estimate("k3", logprobs_T, reference_T)
    values_T.sum().backward()
    assert logprobs_T.grad is not None
    # Past the bend ours goes on as the tangent to TRL's there; TRL's grows exponentially.
    bend = theirs["distances"].index(-K3_BEND)
    value, slope = theirs["values"][bend], theirs["slopes"][bend]
    for place, distance in enumerate(theirs["distances"]):
        past = distance < -K3_BEND
        line = value + slope * (distance + K3_BEND)
        wanted = (line, slope) if past else (theirs["values"][place], theirs["slopes"][place])
        found = (values_T[place].item(), logprobs_T.grad[place].item())
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("place", range(len(GOLDEN["logprobs"])))
def test_logprobs_and_entropy_of_logits(place: int) -> None:
    theirs = GOLDEN["logprobs"][place]
    logits_NV = torch.tensor(theirs["logits"], requires_grad=True)
    token_ids_N = torch.tensor(theirs["token_ids"])
    ours = token_logprobs(logits_NV, token_ids_N, temperature=theirs["temperature"], entropy=True)
    assert ours.entropy_N is not None
    (ours.logprobs_N.sum() + 0.5 * ours.entropy_N.sum()).backward()
    assert logits_NV.grad is not None
    assert ours.logprobs_N.tolist() == pytest.approx(theirs["logprobs"], **FLOAT32)
    assert ours.entropy_N.tolist() == pytest.approx(theirs["entropy"], **FLOAT32)
    assert_same(logits_NV.grad.tolist(), theirs["gradient"], FLOAT32)


def test_supervised_loss_in_two_micro_batches() -> None:
    theirs, step = GOLDEN["supervised"], GOLDEN["steps"]["apart"]
    batch, leaf_T = batch_of(step), column_of(step, "logprobs").requires_grad_()
    shares = []
    for own in torch.arange(batch.num_sequences).chunk(2):
        outputs = ModelOutputs(leaf_T[batch.token_index_T(own.tolist())])
        shares.append(SupervisedLoss()(outputs, batch.select(own.tolist()), counts_of(batch)).loss)
    loss = torch.stack(shares).sum()
    loss.backward()
    assert leaf_T.grad is not None
    assert loss.item() == pytest.approx(theirs["loss"], **EXACT)
    assert_same(by_answer(leaf_T.grad, batch), theirs["gradient"], EXACT)


def test_a_whole_pass_through_a_model() -> None:
    """TRL pads and projects by itself; ours has one answer at a time, and no old logprobs."""
    theirs = GOLDEN["model"]
    model = AutoModelForCausalLM.from_config(Qwen3Config(**theirs["config"]), dtype=torch.float32)
    fill(model)
    logprobs, entropy = zip(
        *(readouts(model, *row) for row in zip(theirs["prompts"], theirs["answers"], strict=True)),
        strict=True,
    )
    for found, name in ((logprobs, "logprobs"), (entropy, "entropy")):
        assert_same([row.tolist() for row in found], theirs[name], FLOAT32)
    answers = theirs["answers"]
    batch = TokenBatch.from_sequences(
        answers,
        loss_mask=[[1.0] * len(row) for row in answers],
        advantages=[[x] * len(r) for x, r in zip(theirs["advantages"], answers, strict=True)],
    )
    algorithm = vanilla("token-mean", entropy_coeff=theirs["settings"]["entropy_coef"])
    outputs = ModelOutputs(torch.cat(logprobs), torch.cat(entropy))
    loss = policy_loss_fn(algorithm, MAX_NEW_TOKENS)(outputs, batch, counts_of(batch)).loss
    loss.backward()
    assert loss.item() == pytest.approx(theirs["loss"], **FLOAT32)
    norms = {name: x.grad.norm().item() for name, x in model.named_parameters()}
    assert norms == pytest.approx(theirs["gradient_norms"], rel=1e-5)


def readouts(
    model: torch.nn.Module, prompt: list[int], answer: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy of the answer's tokens."""
    logits_NV = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    temperature = GOLDEN["model"]["settings"]["temperature"]
    found = token_logprobs(logits_NV, torch.tensor(answer), temperature=temperature, entropy=True)
    assert found.entropy_N is not None
    return found.logprobs_N, found.entropy_N
