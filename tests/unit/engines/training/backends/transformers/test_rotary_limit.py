"""Rotary embeddings that depend on the longest sequence: no sequence sees who is beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.config.training import TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.transformers.build import build_model
from engines.training.spec import EngineSpec
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_sequence_computes_alone_as_it_does_among_others(
    model_type: str, make_model: Callable[..., Path]
) -> None:
    model_dir = make_model(model_type, **MODELS[model_type])
    rows = [[3 + i % 7 for i in range(n)] for n in (5, 9, 16)]
    spec = EngineSpec(model_dir, TrainingConfig(), None, 1, CPUPlatform(), 0)
    engine = FSDP2Engine(spec)
    engine.initialize()
    packed = engine.infer_batch(TokenBatch.from_sequences(rows)).logprobs_T
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for row, ours in zip(rows, packed.split([len(row) for row in rows]), strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        assert ours[1:].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(ConfigError, match=r"model.path: .* exceeds 16 tokens; got 17; set model"):
        engine.infer_batch(TokenBatch.from_sequences([*rows, [3] * 17]))


@pytest.mark.parametrize("model_type", MODELS)
def test_sharded_models_have_the_same_angles(
    model_type: str, make_model: Callable[..., Path]
) -> None:
    spec = EngineSpec(
        make_model(model_type, **MODELS[model_type]), TrainingConfig(), None, 1, CPUPlatform(), 0
    )
    whole, from_meta = (
        build_model(spec, shard, load_weights=True) for shard in (None, lambda model: None)
    )
    expected = dict(whole.named_buffers())
    found = dict(from_meta.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
