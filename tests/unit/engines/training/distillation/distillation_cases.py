"""Distillation through whole training steps: the engines' side, and whole logits beside it.

The reference is transformers and torch alone, one sequence at a time, with all logits.
"""

from pathlib import Path
from typing import Any

import torch
from rlhf.testing.context import OPTIMIZER, share
from rlhf.testing.plain_loop import NUM_STEPS, Row, load, make_batch, plain_steps
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForCausalLM

from engines.algorithms.distillation import TopKDistillation
from engines.config.training import TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.training.model import linear_tiles
from engines.types import Readouts, TokenBatch
from hardware.cpu import CPUPlatform

VOCABULARY = 37
"""Does not divide over two ranks."""
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
WIDER = {"hidden_size": 64, "head_dim": 16}
TEMPERATURE = 0.7
Step = tuple[float, float]


def write_models(root: Path) -> None:
    """A student and a teacher of another architecture and width, far apart."""
    for name, peculiar in {
        "student": {"model_type": "qwen3", "tie_word_embeddings": True},
        "teacher": {"model_type": "llama", "tie_word_embeddings": False, **WIDER},
    }.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**{**SHAPE, **peculiar}), dtype=torch.float32
            )
        model.save_pretrained(root / name)


def make_engine(
    hf_dir: Path, *, frozen: bool = False, num_workers: int = 1, **training: Any
) -> BaseEngine:  # fmt: skip
    """Initialized, at the temperature of the cases."""
    config = TrainingConfig(num_workers=num_workers, collective_timeout_s=60.0, **training)
    engine = create_engine(
        "language_model", hf_dir, config, None if frozen else OPTIMIZER, 100, CPUPlatform(),
        seed=0, temperature=TEMPERATURE,
    )  # fmt: skip
    engine.initialize()
    return engine


def in_small_tiles() -> None:
    """Cut a head of `VOCABULARY` words along both sides, for the rest of this process."""
    linear_tiles.DEFAULT_CHUNK_ELEMENTS = 60
    linear_tiles._MIN_ROWS = 4  # pyright: ignore[reportPrivateUsage]


def taught(teacher: BaseEngine, batch: TokenBatch, num_top: int) -> TokenBatch:
    """The batch with the teacher's columns."""
    found = teacher.infer_batch(batch, Readouts(num_top=num_top))
    assert found.topk_ids_TK is not None
    assert found.topk_logprobs_TK is not None
    return batch.with_columns(
        teacher_topk_ids=found.topk_ids_TK, teacher_topk_logprobs=found.topk_logprobs_TK
    )


def steps_of(student: BaseEngine, teacher: BaseEngine, num_top: int) -> list[Step]:
    """(loss, gradient norm) of each step of an engine."""
    found: list[Step] = []
    for step in range(NUM_STEPS):
        batch = taught(teacher, share(student, make_batch(step)), num_top)
        update = student.train_batch(batch, TopKDistillation())
        found.append((update.loss, update.grad_norm))
    return found


def plainly(root: Path, num_top: int) -> list[Step]:
    """The same of all logits; below the whole vocabulary the others are one event, the rest."""
    teacher = load(root / "teacher")

    def loss_of(student: nn.Module, rows: list[Row]) -> Tensor:
        num_tokens = sum(int(mask.sum()) for _, mask in rows)
        loss = torch.zeros(())
        for ids, mask in rows:
            with torch.no_grad():
                taught_TV = distribution(teacher, ids)
            own_TV = distribution(student, ids)
            if num_top < VOCABULARY:
                top_TK = taught_TV.topk(num_top, dim=1).indices
                taught_TV, own_TV = (with_rest(p, top_TK) for p in (taught_TV, own_TV))
            kl_T = kl_divergence(Categorical(probs=taught_TV), Categorical(probs=own_TV))
            loss = loss + (kl_T * mask).sum() / num_tokens
        return loss

    return plain_steps(load(root / "student"), loss_of)


def distribution(model: nn.Module, ids: Tensor) -> Tensor:
    """(T - 1, V) probabilities of what comes after each token but the last."""
    return (model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).softmax(dim=1)


def with_rest(p_TV: Tensor, top_TK: Tensor) -> Tensor:
    """(T, K + 1) probabilities of K tokens and of all others."""
    p_TK = p_TV.gather(1, top_TK)
    return torch.cat([p_TK, p_TV.sum(dim=1, keepdim=True) - p_TK.sum(dim=1, keepdim=True)], dim=1)
