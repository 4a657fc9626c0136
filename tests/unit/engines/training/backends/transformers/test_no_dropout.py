"""Training sees the log-probabilities that inference sees, whatever a model would draw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

BATCH = TokenBatch.from_sequences(
    [[8, 9], [10, 11, 12], [3, 4, 5, 6, 7]]
)  # as micro-batches order them
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_dropout": 0.3},
    "seed_oss": {"attention_dropout": 0.3, "residual_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "phi": {"resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "num_local_experts": 4},
}
"""Architecture -> what it draws in training mode."""


def gradient_norm_and_logprobs(model_dir: Path, **training: Any) -> tuple[float, Tensor, Tensor]:
    """Of a step of any size, and the log-probabilities that the step and inference see."""
    optimizer = OptimizerConfig(lr=1e-9)
    spec = EngineSpec(model_dir, TrainingConfig(**training), optimizer, 1, CPUPlatform(), 0)
    engine = FSDP2Engine(spec)
    engine.initialize()
    inferred = engine.infer_batch(BATCH).logprobs_T
    seen: list[Tensor] = []

    def loss(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append(outputs.logprobs_T.detach())
        return LossOutput(-outputs.logprobs_T.sum() / counts.num_tokens)

    mask_T = torch.ones(BATCH.num_tokens)
    mask_T[BATCH.cu_seqlens[:-1].long()] = 0
    update = engine.train_batch(BATCH.with_columns(loss_mask=mask_T), loss)
    return update.grad_norm, torch.cat(seen), inferred


@pytest.mark.parametrize("model_type", RANDOM)
def test_nothing_is_drawn_in_training(model_type: str, make_model: Callable[..., Path]) -> None:
    model_dir = make_model(model_type, **RANDOM[model_type])
    plain, trained, inferred = gradient_norm_and_logprobs(model_dir)
    assert (inferred < 0).any()
    assert torch.equal(trained, inferred)
    recomputed, trained, inferred = gradient_norm_and_logprobs(
        model_dir, gradient_checkpointing=True
    )
    assert torch.equal(trained, inferred)
    assert plain == pytest.approx(recomputed, rel=1e-6)
    assert plain > 0
