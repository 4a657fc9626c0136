"""Losses over pairs in other words than ours: plain torch, the papers' formulas, whole sequences.

Also the steps that they are tried on: pairs laid out as awkwardly as a batch may be, with one
trained token against many, none on a side, or none at all.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedModel

from engines.algorithms.preference.answers import answers_of
from engines.algorithms.preference.kto import mismatched
from engines.algorithms.preference.options import (
    IpoOptions,
    KtoOptions,
    OrpoOptions,
    RewardModelOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.algorithms.preference.pair_objective import (
    ipo_loss,
    orpo_loss,
    sigmoid_loss,
    simpo_loss,
)
from engines.types import TokenBatch

Size = tuple[int, int, int]
"""Of a pair: prompt tokens, trained tokens of the chosen answer, and of the rejected one."""
LENGTH = 26
"""Of both sequences of a pair of `SIZES` together, so that a budget says how many pairs fit."""
SIZES = [(2, 1, 17), (1, 19, 1), (3, 8, 8), (4, 0, 14), (9, 1, 3), (2, 1, 17), (11, 0, 0)]
KTO = KtoOptions(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)
REWARD = RewardModelOptions(margin_coef=0.5, center_coef=0.1)
Side = dict[str, Any]


def make_pairs(sizes: Sequence[Size], seed: int = 0) -> TokenBatch:
    """The pairs of a step with all that a loss may read, in float64.

    Units have numbers in no order, and the sequences of one lie apart. Answers have two tokens that
    are not trained on: one inside, one at the end.
    """
    source = random.Random(seed)
    numbers = source.sample(range(100), len(sizes))
    sequences = [
        (number, float(chosen), size[0], size[1] if chosen else size[2])
        for number, size in zip(numbers, sizes, strict=True)
        for chosen in (True, False)
    ]
    source.shuffle(sequences)
    masks = [
        [0.0] * prompt + [1.0] * min(trained, 1) + [0.0] + [1.0] * max(trained - 1, 0) + [0.0]
        for _, _, prompt, trained in sequences
    ]
    batch = TokenBatch.from_sequences(
        [[source.randrange(3, 30) for _ in mask] for mask in masks], loss_mask=masks
    )
    batch = TokenBatch(
        batch.input_ids_T,
        batch.cu_seqlens,
        batch.columns,
        unit_B=torch.tensor([number for number, *_ in sequences]),
    )
    generator = torch.Generator().manual_seed(seed)

    def drawn(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return batch.with_columns(ref_logprobs=-3 * drawn(batch.num_tokens).abs()).with_rows(
        chosen=torch.tensor([chosen for _, chosen, *_ in sequences]),
        margin=drawn(batch.num_sequences).abs(),
        mismatch_log_ratio=drawn(batch.num_sequences) + 0.3,
    )


def ids_of(batch: TokenBatch) -> list[Tensor]:
    return list(batch.input_ids_T.split(batch.lengths_B.tolist()))


def logprobs_of(model: nn.Module, ids: Tensor) -> Tensor:
    """(T,) 0 at the first token."""
    logits = model(input_ids=ids[None]).logits[0, :-1]
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, -cross_entropy(logits, ids[1:], reduction="none")])


def with_reference(batch: TokenBatch, model: nn.Module) -> TokenBatch:
    """With a reference near the policy, and what an answer to another prompt has of both.

    Args:
        batch: of `SIZES`.
        model: the policy, in float64.
    """
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        logprobs_T = torch.cat([logprobs_of(model, ids) for ids in ids_of(batch)])
        others = mismatched(batch, LENGTH)
        policy_T = torch.cat([logprobs_of(model, ids) for ids in ids_of(others)])
    noise_T = 0.5 * torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    shift_T = 0.1 * torch.randn(others.num_tokens, generator=generator, dtype=torch.float64) - 0.05
    found = answers_of(
        policy_T, others.with_columns(ref_logprobs=policy_T + shift_T), reference=True
    )
    batch = batch.with_columns(ref_logprobs=(logprobs_T + noise_T).float())
    return batch.with_rows(mismatch_log_ratio=found.log_ratio_N)


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


def plain_rpo(good: Side, bad: Side, batch: TokenBatch) -> Tensor:
    compared = binary_cross_entropy_with_logits(0.3 * (good["ratio"] - bad["ratio"]), one())
    return compared - 0.7 * mean(good, "logprob")


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


PAIR_LOSSES: dict[str, tuple[Any, Any, Callable[..., Tensor]]] = {
    "sigmoid": (sigmoid_loss, SigmoidOptions(beta=0.3, label_smoothing=0.1), plain_sigmoid),
    "rpo": (sigmoid_loss, SigmoidOptions(beta=0.3, likelihood_coef=0.7), plain_rpo),
    "ipo": (ipo_loss, IpoOptions(beta=0.2), plain_ipo),
    "simpo": (simpo_loss, SimpoOptions(beta=2.5, gamma=1.4), plain_simpo),
    "orpo": (orpo_loss, OrpoOptions(beta=0.4), plain_orpo),
}


def counted_units(units: dict[int, dict[str, Side]]) -> list[dict[str, Side]]:
    """Those with a trained token."""
    return [unit for unit in units.values() if unit["chosen"]["n"] + unit["rejected"]["n"]]


def plain_loss_of_pairs(name: str, model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """The mean over the pairs that count."""
    _, _, formula = PAIR_LOSSES[name]
    units = counted_units(sides_of(model, batch, scores=False))
    return torch.stack([formula(unit["chosen"], unit["rejected"], batch) for unit in units]).mean()


def plain_kto(model: PreTrainedModel, batch: TokenBatch, z0: float) -> Tensor:
    """The mean over the answers with a trained token."""
    terms = []
    for unit in sides_of(model, batch, scores=False).values():
        for name, weight, sign in (("chosen", 1.2, 1), ("rejected", 0.7, -1)):
            if unit[name]["n"]:
                value = torch.tanh(sign * 0.4 * (unit[name]["ratio"] - z0) / 2)
                terms.append(weight * (1 - (1 + value) / 2))
    return torch.stack(terms).mean()


def reference_point(batch: TokenBatch) -> float:
    """z0 of KTO: the mean log-ratio of the answers to other prompts, of sequences that count."""
    log_ratios = [
        batch.rows["mismatch_log_ratio"][i].item()
        for i, mask in enumerate(batch.columns["loss_mask"].split(batch.lengths_B.tolist()))
        if mask.any()
    ]
    return max(0.0, math.fsum(log_ratios) / len(log_ratios))


def plain_scores_loss(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Of a reward model, the mean over the pairs that count."""
    units = counted_units(sides_of(model, batch, scores=True))
    terms = [plain_reward(unit["chosen"], unit["rejected"], batch) for unit in units]
    return torch.stack(terms).mean()
