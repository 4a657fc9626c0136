"""Persistent buffers, and what an architecture keeps in float32, reach a bfloat16 rollout whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.hub_names import served_float32_names
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import WeightSyncError
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.base import create_engine
from engines.types import RolloutRequest, SamplingParams
from hardware.cpu import CPUPlatform

SHAPE = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 0, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
KEPT = {
    "qwen3_moe": set(),
    "glm4_moe": {BIAS},
    "dots1": {BIAS},
    "minimax_m2": {f"model.layers.{i}.block_sparse_moe.e_score_correction_bias" for i in (0, 1)},
    "ernie4_5_moe": {
        f"model.layers.{i}.mlp.{name}"
        for i in (0, 1)
        for name in ("gate.weight", "moe_statics.e_score_correction_bias")
    },
}
"""Model type -> what is float32 in it whatever its dtype; transformers declares it in four ways."""
REQUEST = RolloutRequest("r", tuple(range(5, 25)), SamplingParams(8), tuple(range(16)))
VALUES = torch.tensor([0.1, 0.2, 0.3, 1.0]) / 3  # none of them is a bfloat16


def write(path: Path, model_type: str) -> Any:
    config = AutoConfig.for_model(model_type, **SHAPE)
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if "e_score" in name:
                    tensor.copy_(torch.rand(tensor.shape))
                else:
                    tensor.add_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(path)
    return model


def rollout(path: Path, dtype: str = "bfloat16") -> TransformersEngine:
    return TransformersEngine(path, RolloutConfig(), dtype, CPUPlatform())


def send(engine, path: Path, tensors, version: int, dtype: str = "bfloat16"):
    kept = served_float32_names(path, getattr(torch, dtype))
    return send_weights(engine, tensors, version, dtype, kept)


def held(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    """By names on disk, from the module that computes."""
    state = engine._model._model.state_dict()
    return {name: slot.view(state[slot.parameter]) for name, slot in engine._model._slots.items()}


@pytest.fixture
def trainer(tmp_path):
    write(tmp_path, "glm4_moe")
    engine = create_engine(
        "language_model", tmp_path, TrainingConfig(), OptimizerConfig(), 10, CPUPlatform(), seed=0
    )
    engine.initialize()
    return engine


@pytest.mark.parametrize("model_type", KEPT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_arrives_in_its_own_dtype(tmp_path, model_type, dtype):
    write(tmp_path, model_type)
    stored = load_file(tmp_path / "model.safetensors")
    engine = rollout(tmp_path, dtype)
    report = send(engine, tmp_path, stored.items(), 0, dtype)
    assert (engine.version, report.num_tensors) == (0, len(stored))
    cast = getattr(torch, dtype)
    for name, tensor in held(engine).items():
        expected = stored[name] if name in KEPT[model_type] else stored[name].to(cast)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    (completion, *_) = generate_all(engine, [REQUEST])
    assert completion.policy_versions.tolist() == [0] * len(completion.token_ids)


@pytest.mark.parametrize("model_type", sorted(KEPT.keys() - {"minimax_m2"}))
def test_float32_names_are_those_of_transformers_itself(tmp_path, model_type):
    """But MiniMax's bias, which `from_pretrained` would round and training does not."""
    write(tmp_path, model_type)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert served_float32_names(tmp_path, torch.bfloat16) == kept == KEPT[model_type]


def test_a_buffer_changed_in_training_changes_what_is_sampled(tmp_path, trainer):
    buffer = dict(trainer.model.named_buffers())[BIAS]
    engine = rollout(tmp_path)
    logprobs = []
    for version, values in enumerate([VALUES, VALUES, VALUES.flip(0)]):
        buffer.copy_(values)
        send(engine, tmp_path, trainer.get_per_tensor_param(), version)
        arrived = held(engine)[BIAS]
        assert arrived.dtype == torch.float32
        assert torch.equal(arrived, values)
        logprobs.append([c.logprobs.tolist() for c in generate_all(engine, [REQUEST])])
    assert logprobs[0] == logprobs[1] != logprobs[2]


def test_a_buffer_that_was_not_sent_or_was_rounded_is_refused(tmp_path, trainer):
    sent = {name: tensor.clone() for name, tensor in trainer.get_per_tensor_param()}
    engine = rollout(tmp_path)
    with pytest.raises(WeightSyncError, match=f"not sent, first {BIAS}"):
        send(engine, tmp_path, [(n, t) for n, t in sent.items() if n != BIAS], 0)
    with pytest.raises(WeightSyncError, match=f"{BIAS}: sent torch.bfloat16, .* torch.float32"):
        send_weights(engine, sent.items(), 0, "bfloat16")
    assert engine.version == -1


def test_a_buffer_that_was_written_elsewhere_is_caught(tmp_path, trainer):
    engine = rollout(tmp_path)
    send(engine, tmp_path, trainer.get_per_tensor_param(), 0)
    table = engine._model._parameters
    table[BIAS] = table[BIAS].clone()
    dict(trainer.model.named_buffers())[BIAS].copy_(VALUES)
    with pytest.raises(WeightSyncError, match="sent digest"):
        send(engine, tmp_path, trainer.get_per_tensor_param(), 1)


def test_a_buffer_survives_sleep_in_its_dtype(tmp_path, trainer):
    engine = rollout(tmp_path)
    first = send(engine, tmp_path, trainer.get_per_tensor_param(), 0)
    asyncio.run(engine.sleep())
    assert all(tensor.numel() == 0 for tensor in engine._model._parameters.values())
    asyncio.run(engine.wake_up())
    assert send(engine, tmp_path, trainer.get_per_tensor_param(), 1).digest == first.digest
    assert held(engine)[BIAS].dtype == torch.float32
