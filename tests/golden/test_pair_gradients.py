"""Losses over pairs, of a reward model and of a teacher: one gradient under every layout and cut.

It is that of plain transformers in float64, one sequence at a time, by the papers' formulas in
other words (`plain_pairs`). On one rank more of each is looked at beside the source.
"""

from pathlib import Path

import pair_gradients
import pytest
import torch
from loss_gradients import relative_errors
from plain_pairs import (
    PAIR_LOSSES,
    SIZES,
    ids_of,
    make_pairs,
    plain_kto,
    plain_loss_of_pairs,
    plain_scores_loss,
    reference_point,
    with_reference,
)
from rlhf.testing.launch import launch
from rlhf.testing.tiny_models import write_tiny_models
from safetensors.torch import load_file
from test_loss_gradients import LAYOUTS
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from engines.types import TokenBatch

PROGRAM = Path(pair_gradients.__file__)
DEADLINE_S = 400.0
TOLERANCE = 1e-5
NUM_TOP = 5
Gradient = dict[str, Tensor]
DATA_PARALLEL = {"alone": 1, "four ranks": 4, "ulysses 2": 1, "tensor 2 x pipeline 2": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a policy, a teacher of other weights, and a reward model."""
    path = tmp_path_factory.mktemp("models")
    write_tiny_models(path)
    config = AutoConfig.from_pretrained(path / "qwen3", num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        teacher = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        scores = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        nn.init.normal_(scores.score.weight, std=0.2)
    teacher.save_pretrained(path / "teacher")
    scores.save_pretrained(path / "scores")
    return path


@pytest.fixture(scope="module")
def step(models: Path) -> TokenBatch:
    """Pairs of adversarial lengths with what the policy's reference and a teacher say."""
    policy = AutoModelForCausalLM.from_pretrained(models / "qwen3").double()
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher").double()
    batch = with_reference(make_pairs(SIZES * pair_gradients.REPEATS, 5), policy)
    tops = []
    with torch.no_grad():
        for ids in ids_of(batch):
            logprobs = distribution(teacher, ids).logits
            tops.append(torch.cat([logprobs[:1], logprobs]).topk(NUM_TOP, dim=1))
    return batch.with_columns(
        teacher_topk_ids=torch.cat([top.indices for top in tops]),
        teacher_topk_logprobs=torch.cat([top.values for top in tops]).float(),
    )


def distribution(model: nn.Module, ids: Tensor) -> Categorical:
    """(T - 1, V) of what comes after each token but the last."""
    return Categorical(logits=model(input_ids=ids[None]).logits[0, :-1])


@pytest.fixture(scope="module")
def plain(models: Path, step: TokenBatch) -> dict[str, Gradient]:
    """By loss and weight."""
    policy = AutoModelForCausalLM.from_pretrained(models / "qwen3").double()
    scores = AutoModelForSequenceClassification.from_pretrained(models / "scores").double()
    # An engine's values have a bias.
    scores.score.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    losses = {name: plain_loss_of_pairs(name, policy, step) for name in PAIR_LOSSES}
    losses["kto"] = plain_kto(policy, step, reference_point(step))
    losses["topk"] = plain_topk(policy, step)
    found = {name: gradient(policy, loss) for name, loss in losses.items()}
    return found | {pair_gradients.SCORES: gradient(scores, plain_scores_loss(scores, step))}


def plain_topk(student: nn.Module, batch: TokenBatch) -> Tensor:
    """The mean over trained tokens of the KL over the teacher's tokens and the rest as one more."""
    terms, bounds = [], batch.cu_seqlens.tolist()
    for index, ids in enumerate(ids_of(batch)):
        own = slice(bounds[index] + 1, bounds[index + 1])
        top_TK = batch.columns["teacher_topk_ids"][own]
        taught_TK = batch.columns["teacher_topk_logprobs"][own].double().exp()
        own_TK = distribution(student, ids).probs.gather(1, top_TK)
        taught, learnt = (
            Categorical(probs=torch.cat([p, 1 - p.sum(dim=1, keepdim=True)], dim=1))
            for p in (taught_TK, own_TK)
        )
        terms.append(kl_divergence(taught, learnt) * batch.columns["loss_mask"][own])
    return torch.cat(terms).sum() / batch.columns["loss_mask"].sum()


def gradient(model: nn.Module, loss: Tensor) -> Gradient:
    model.zero_grad()
    loss.backward()
    return {
        key: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for key, p in model.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_has_the_gradient_of_plain_transformers(
    layout: str, models: Path, step: TokenBatch, plain: dict[str, Gradient], tmp_path: Path
) -> None:
    backend, world_size, training = LAYOUTS[layout]
    pair_gradients.store(step, tmp_path / "step.safetensors")
    arguments = {
        "policy": models / "qwen3", "reward": models / "scores",
        "batch": tmp_path / "step.safetensors", "out": tmp_path / "found.safetensors",
        "backend": backend, "training": training, "data-parallel-size": DATA_PARALLEL[layout],
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in arguments.items()]
    launch([str(PROGRAM), *argv], world_size, tmp_path, DEADLINE_S)
    errors = relative_errors(load_file(tmp_path / "found.safetensors"), plain)
    assert len(errors) == len(plain) * 2
    assert max(errors.values()) <= TOLERANCE, errors
