"""Through a training engine every loss has the gradient of a plain loop over whole sequences.

The reference is transformers and torch alone in float64, one sequence at a time, with the papers'
formulas in other words. Pairs have one trained token against many, none on a side, or none at all.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_gradients import OPTIMIZER, SCALE
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from engines.algorithms.preference.answers import answers_of
from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.mismatch import mismatched
from engines.algorithms.preference.options import (
    IpoOptions,
    KtoOptions,
    OrpoOptions,
    RewardModelOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.algorithms.preference.pair_losses import (
    ipo_loss,
    orpo_loss,
    sigmoid_loss,
    simpo_loss,
)
from engines.algorithms.preference.pair_objective import PairObjective
from engines.algorithms.preference.reward_objective import RewardModelObjective
from engines.config.training import TrainingConfig
from engines.training.create import create_engine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

LENGTH = 26
"""Of both sequences of a pair together, so that a budget says how many pairs fit."""
SIZES = [(2, 1, 17), (1, 19, 1), (3, 8, 8), (4, 0, 14), (9, 1, 3), (2, 1, 17), (11, 0, 0)]
NUM_COUNTED_PAIRS, NUM_COUNTED_ANSWERS = 6, 11
TOLERANCE = 1e-5
MODEL = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_labels": 1,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
Side = dict[str, Any]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(AutoModelForCausalLM, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(AutoModelForSequenceClassification, tmp_path_factory.mktemp("reward"))


def write(kind: Any, path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind.from_config(AutoConfig.for_model("qwen3", **MODEL))
        for name, parameter in model.named_parameters():
            if name == "score.weight" or parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pairs(make_pairs: Callable[..., TokenBatch], policy_dir: Path) -> TokenBatch:
    """With a reference near the policy, and what an answer to another prompt has of both."""
    batch = make_pairs(SIZES, 5)
    assert batch.num_tokens == len(SIZES) * LENGTH
    generator = torch.Generator().manual_seed(6)
    model = AutoModelForCausalLM.from_pretrained(policy_dir).double()
    with torch.no_grad():
        logprobs_T = torch.cat([logprobs_of(model, ids) for ids in ids_of(batch)])
        others = mismatched(batch, LENGTH)
        policy_T = torch.cat([logprobs_of(model, ids) for ids in ids_of(others)])
    noise_T = 0.5 * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    shift_T = 0.1 * torch.randn(others.num_tokens, generator=generator, dtype=torch.float64) - 0.05
    others = others.with_columns(ref_logprobs=policy_T + shift_T)
    found = answers_of(policy_T, others, reference=True)
    batch = batch.with_columns(ref_logprobs=(logprobs_T + noise_T).float())
    return batch.with_rows(mismatch_log_ratio=found.log_ratio_N)


def ids_of(batch: TokenBatch) -> list[Tensor]:
    return list(batch.input_ids_T.split(batch.lengths_B.tolist()))


def logprobs_of(model: nn.Module, ids: Tensor) -> Tensor:
    """(T,) 0 at the first token."""
    logits = model(input_ids=ids[None]).logits[0, :-1]
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, -cross_entropy(logits, ids[1:], reduction="none")])


def sides_of(model: PreTrainedModel, batch: TokenBatch, scores: bool) -> dict[int, dict[str, Side]]:
    """By unit and side, what the plain loop sees of a sequence."""
    bounds, found = batch.cu_seqlens.tolist(), {}
    assert batch.unit_B is not None
    for index, ids in enumerate(ids_of(batch)):
        own = slice(bounds[index], bounds[index + 1])
        on = batch.columns["loss_mask"][own] == 1
        side = {"n": int(on.sum()), "row": index}
        if scores:
            side["score"] = model(input_ids=ids[None]).logits[0, 0]
        else:
            logprobs = logprobs_of(model, ids)
            side["logprob"] = logprobs[on].sum()
            side["ratio"] = (logprobs - batch.columns["ref_logprobs"][own])[on].sum()
        name = "chosen" if batch.rows["chosen"][index] else "rejected"
        found.setdefault(int(batch.unit_B[index]), {})[name] = side
    return found


def mean(side: Side, name: str) -> Tensor:
    return side[name] / side["n"] if side["n"] else side[name] * 0


def one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


def plain_sigmoid(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    return binary_cross_entropy_with_logits(0.3 * (good["ratio"] - bad["ratio"]), 0.9 * one())


def plain_ipo(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    return (mean(good, "ratio") - mean(bad, "ratio") - 1 / (2 * 0.2)) ** 2


def plain_simpo(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    gap = 2.5 * mean(good, "logprob") - 2.5 * mean(bad, "logprob")
    return binary_cross_entropy_with_logits(gap - 1.4, one())


def plain_orpo(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    """-mean - 0.4 log(odds_w / (odds_w + odds_l)), in probabilities; 10,000 for certain odds."""
    certain = math.exp(-1e-4) / -math.expm1(-1e-4) * math.exp(1 + 1e-4)
    odds = [
        (p := mean(side, "logprob").exp()) / (1 - p) if side["n"] else certain * one()
        for side in (good, bad)
    ]
    return -mean(good, "logprob") - 0.4 * (odds[0] / (odds[0] + odds[1])).log()


def plain_reward(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    gap = good["score"] - bad["score"] - 0.5 * batch.rows["margin"][good["row"]]
    center = (good["score"] + bad["score"]) ** 2
    return binary_cross_entropy_with_logits(gap, one()) + 0.1 * center


PAIR_LOSSES = {
    "sigmoid": (sigmoid_loss, SigmoidOptions(beta=0.3, label_smoothing=0.1), plain_sigmoid),
    "ipo": (ipo_loss, IpoOptions(beta=0.2), plain_ipo),
    "simpo": (simpo_loss, SimpoOptions(beta=2.5, gamma=1.4), plain_simpo),
    "orpo": (orpo_loss, OrpoOptions(beta=0.4), plain_orpo),
}


class Counted:
    """An objective that counts its micro-batches."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.num_calls = loss, 0
        for name in ("extras", "readouts"):
            if hasattr(loss, name):
                setattr(self, name, getattr(loss, name))

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        self.num_calls += 1
        return self.loss(outputs, batch, counts)


def check(
    loss: Any,
    batch: TokenBatch,
    path: Path,
    kind: Any,
    num_micro: int,
    plain: Callable[..., Tensor],
) -> Mapping[str, float]:
    """Loss and gradient of one step of the engine against the plain ones; its metrics."""
    model = kind.from_pretrained(path).double()
    if kind is AutoModelForSequenceClassification:  # an engine's values have one
        model.score.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    wanted = plain(model)
    wanted.backward()
    config = TrainingConfig(
        backend="fsdp2", max_tokens_per_micro_batch=len(SIZES) * LENGTH // num_micro
    )
    model_type = "language_model" if kind is AutoModelForCausalLM else "value_model"
    engine = create_engine(model_type, path, config, OPTIMIZER, 10, CPUPlatform(), 0)
    engine.initialize()
    before = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()}
    counted = Counted(loss)
    found = engine.train_batch(batch, counted)
    assert counted.num_calls == num_micro
    assert found.loss == pytest.approx(wanted.item(), rel=1e-5)
    ours = {
        key: (before[key].double() - tensor.double()) / SCALE
        for key, tensor in engine.get_per_tensor_param()
    }
    theirs = {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in model.named_parameters()
    }
    assert ours.keys() == theirs.keys()
    size = torch.stack([each.norm() for each in theirs.values()]).norm()
    gap = torch.stack([(ours[key] - theirs[key]).norm() for key in theirs]).norm()
    assert size > 1e-3
    assert found.grad_norm == pytest.approx(size.item(), rel=1e-4)
    assert gap / size <= TOLERANCE
    return found.metrics


@pytest.mark.parametrize("num_micro", [1, 7])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_over_pairs(name: str, num_micro: int, pairs: TokenBatch, policy_dir: Path) -> None:
    loss, options, formula = PAIR_LOSSES[name]

    def plain(model: PreTrainedModel) -> Tensor:
        units = sides_of(model, pairs, scores=False).values()
        terms = [
            formula(unit["chosen"], unit["rejected"], pairs)
            for unit in units
            if unit["chosen"]["n"] + unit["rejected"]["n"]
        ]
        assert len(terms) == NUM_COUNTED_PAIRS
        return torch.stack(terms).mean()

    objective = PairObjective(loss, options)
    metrics = check(objective, pairs, policy_dir, AutoModelForCausalLM, num_micro, plain)
    assert 0 <= metrics["preference/accuracy"] <= 1


@pytest.mark.parametrize("with_units", [True, False])
@pytest.mark.parametrize("num_micro", [1, 7])
def test_kto(num_micro: int, with_units: bool, pairs: TokenBatch, policy_dir: Path) -> None:
    """Answers of pairs, and answers by themselves."""
    options = KtoOptions(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)
    log_ratios = [
        pairs.rows["mismatch_log_ratio"][i].item()
        for i, mask in enumerate(pairs.columns["loss_mask"].split(pairs.lengths_B.tolist()))
        if mask.any()
    ]
    z0 = max(0.0, math.fsum(log_ratios) / NUM_COUNTED_ANSWERS)
    assert z0 > 0

    def plain(model: PreTrainedModel) -> Tensor:
        terms = []
        for unit in sides_of(model, pairs, scores=False).values():
            for name, weight, sign in (("chosen", 1.2, 1), ("rejected", 0.7, -1)):
                if unit[name]["n"]:
                    value = torch.tanh(sign * 0.4 * (unit[name]["ratio"] - z0) / 2)
                    terms.append(weight * (1 - (1 + value) / 2))
        assert len(terms) == len(log_ratios) == NUM_COUNTED_ANSWERS
        return torch.stack(terms).mean()

    batch = pairs if with_units else replace(pairs, unit_B=None)
    metrics = check(
        KtoObjective(options), batch, policy_dir, AutoModelForCausalLM, num_micro, plain
    )
    assert metrics["preference/kl"] == pytest.approx(z0)


@pytest.mark.parametrize("num_micro", [1, 7])
def test_a_reward_model(num_micro: int, pairs: TokenBatch, reward_dir: Path) -> None:
    """Its scores are those of transformers' sequence classification."""
    options = RewardModelOptions(margin_coef=0.5, center_coef=0.1)
    gaps = []

    def plain(model: PreTrainedModel) -> Tensor:
        units = [
            (unit["chosen"], unit["rejected"])
            for unit in sides_of(model, pairs, scores=True).values()
            if unit["chosen"]["n"] + unit["rejected"]["n"]
        ]
        gaps.extend((good["score"] - bad["score"]).item() for good, bad in units)
        return torch.stack([plain_reward(good, bad, pairs) for good, bad in units]).mean()

    objective = RewardModelObjective(options)
    kind = AutoModelForSequenceClassification
    metrics = check(objective, pairs, reward_dir, kind, num_micro, plain)
    assert len(gaps) == NUM_COUNTED_PAIRS
    assert metrics["reward_model/margin"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert metrics["reward_model/accuracy"] == pytest.approx(sum(g > 0 for g in gaps) / len(gaps))
