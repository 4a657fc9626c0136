"""What the memory audit counts on one device, against the device's allocator.

The CPU half counts the same; its comparison with resident memory needs a process of its own and
stands in `tests/unit/engines/training/memory`.
"""

import gc
from pathlib import Path

import pytest
import torch
from rlhf.testing.memory_formulas import Shape, state_bytes
from rlhf.testing.memory_ranks import TOKENS, draw_batch, likelihood
from transformers import AutoConfig, AutoModelForCausalLM

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import create_engine
from engines.training.memory_audit import MemoryAudit
from hardware.base import PlatformBase

SHAPE = Shape(vocabulary=8192, width=512, layers=4, heads=8, kv_heads=4, head_dim=64, inner=1536)
TOLERANCE = 0.1
WORKSPACE_BYTES = 3 * 32 << 20
"""Of cuBLAS: 32 MiB for each thread that multiplied."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_allocator_holds_what_the_audit_counts(
    platform: PlatformBase, tmp_path: Path, dtype: str, recompute: bool
) -> None:
    config = AutoConfig.for_model("qwen3", **SHAPE.config)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    gc.collect()
    before = platform.memory_allocated_bytes()
    training = TrainingConfig.model_validate(
        {
            "dtype": dtype,
            "gradient_checkpointing": recompute,
            "max_tokens_per_micro_batch": TOKENS,
        }
    )
    engine = create_engine(
        "language_model", tmp_path, training, OptimizerConfig(), 10, platform, seed=0
    )
    engine.initialize()
    audit = MemoryAudit(lambda: [engine], platform)
    for _ in range(2):
        with audit.phase("train"):
            engine.train_batch(draw_batch(2), likelihood)
    found = audit.phases["train"]
    for name, num_bytes in state_bytes(SHAPE, "fsdp2", 1).items():
        assert getattr(found.largest, name) == num_bytes
    assert found.largest.saved_bytes > 0
    assert (found.largest.bucket_bytes > 0) == (dtype == "bfloat16")
    is_cpu = platform.device_name == "cpu"
    assert (found.free_bytes is None) == is_cpu
    held = audit.held()
    assert (held.gradient_bytes, held.saved_bytes, held.bucket_bytes) == (0, 0, 0)
    if not is_cpu:
        on_device = found.system_bytes - before
        assert on_device >= found.counted_bytes
        assert on_device <= found.counted_bytes * (1 + TOLERANCE) + WORKSPACE_BYTES
