"""Through a training engine every loss has the gradient of a plain loop over whole sequences.

The reference is transformers and torch alone in float64, one sequence at a time, with the papers'
formulas in other words. Pairs have one trained token against many, none on a side, or none at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_gradients import OPTIMIZER, SCALE, Counted
from plain_pairs import (
    KTO,
    LENGTH,
    PAIR_LOSSES,
    REWARD,
    SIZES,
    counted_units,
    make_pairs,
    plain_kto,
    plain_loss_of_pairs,
    plain_scores_loss,
    reference_point,
    sides_of,
    with_reference,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.pair_objective import PairObjective, RewardModelObjective
from engines.config.training import TrainingConfig
from engines.training.base import create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

NUM_COUNTED_PAIRS, NUM_COUNTED_ANSWERS = 6, 11
TOLERANCE = 1e-5
MODEL = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_labels": 1,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


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
def pairs(policy_dir: Path) -> TokenBatch:
    """With a reference near the policy, and what an answer to another prompt has of both."""
    batch = make_pairs(SIZES, 5)
    assert batch.num_tokens == len(SIZES) * LENGTH
    return with_reference(batch, AutoModelForCausalLM.from_pretrained(policy_dir).double())


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
    loss, options, _ = PAIR_LOSSES[name]

    def plain(model: PreTrainedModel) -> Tensor:
        assert len(counted_units(sides_of(model, pairs, scores=False))) == NUM_COUNTED_PAIRS
        return plain_loss_of_pairs(name, model, pairs)

    objective = PairObjective(loss, options)
    metrics = check(objective, pairs, policy_dir, AutoModelForCausalLM, num_micro, plain)
    assert 0 <= metrics["preference/accuracy"] <= 1


@pytest.mark.parametrize("with_units", [True, False])
@pytest.mark.parametrize("num_micro", [1, 7])
def test_kto(num_micro: int, with_units: bool, pairs: TokenBatch, policy_dir: Path) -> None:
    """Answers of pairs, and answers by themselves."""
    z0 = reference_point(pairs)
    assert z0 > 0

    def plain(model: PreTrainedModel) -> Tensor:
        units = sides_of(model, pairs, scores=False).values()
        assert sum(side["n"] > 0 for unit in units for side in unit.values()) == NUM_COUNTED_ANSWERS
        return plain_kto(model, pairs, z0)

    batch = pairs if with_units else replace(pairs, unit_B=None)
    metrics = check(KtoObjective(KTO), batch, policy_dir, AutoModelForCausalLM, num_micro, plain)
    assert metrics["preference/kl"] == pytest.approx(z0)


@pytest.mark.parametrize("num_micro", [1, 7])
def test_a_reward_model(num_micro: int, pairs: TokenBatch, reward_dir: Path) -> None:
    """Its scores are those of transformers' sequence classification."""
    gaps = []

    def plain(model: PreTrainedModel) -> Tensor:
        units = counted_units(sides_of(model, pairs, scores=True))
        gaps.extend((unit["chosen"]["score"] - unit["rejected"]["score"]).item() for unit in units)
        return plain_scores_loss(model, pairs)

    kind = AutoModelForSequenceClassification
    metrics = check(RewardModelObjective(REWARD), pairs, reward_dir, kind, num_micro, plain)
    assert len(gaps) == NUM_COUNTED_PAIRS
    assert metrics["reward_model/margin"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert metrics["reward_model/accuracy"] == pytest.approx(sum(g > 0 for g in gaps) / len(gaps))
