"""A small model on disk and the policy artifact of an engine that trained it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

BASE = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


@pytest.fixture
def make_engine() -> Callable[[Path], FSDP2Engine]:
    """`make_engine(hf_dir)`: an initialized engine with an optimizer."""

    def make(hf_dir: Path, *, load_weights: bool = True) -> FSDP2Engine:
        spec = EngineSpec(
            hf_dir, TrainingConfig(), OptimizerConfig(lr=1e-2), 10, CPUPlatform(), seed=0
        )
        engine = FSDP2Engine(spec)
        engine.initialize(load_weights=load_weights)
        return engine

    return make


@pytest.fixture
def make_policy(
    tmp_path: Path, make_engine: Callable[[Path], FSDP2Engine]
) -> Callable[..., tuple[FSDP2Engine, Path]]:
    """`make_policy(model_type, **config)`: an engine after two steps, and its policy directory."""

    def make(model_type: str, **config: Any) -> tuple[FSDP2Engine, Path]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(model_type, **{**BASE, **config}), dtype=torch.float32
            )
        hf_dir, policy = tmp_path / "model", tmp_path / "policy"
        model.save_pretrained(hf_dir)
        engine = make_engine(hf_dir)
        for step in range(2):
            batch = TokenBatch.from_sequences(
                [[3 + step, 4, 5, 6], [7, 8, 9]], loss_mask=[[0, 1, 1, 1], [0, 1, 1]]
            )
            engine.train_batch(batch, sft)
        (policy / "hf").mkdir(parents=True)
        shutil.copy(hf_dir / "config.json", policy / "hf")
        (policy / "checkpoint").mkdir()
        engine.save_checkpoint(policy / "checkpoint", step=2)
        return engine, policy

    return make
