"""The backend contract over several real devices: NCCL, one GPU per rank."""

from pathlib import Path

import pytest
from rlhf.testing.plain_loop import train_plainly
from rlhf.testing.ranks import run_ranks
from rlhf.testing.tiny_models import write_tiny_models

from engines.config.backends import BACKENDS
from hardware.nvidia import NvidiaPlatform

pytestmark = pytest.mark.gpu
LOSS = 2e-4
"""Absolute; matrix products of GPUs add up in another order, and in float32 may use TF32."""


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_every_layout_trains_as_a_plain_loop_does(
    backend: str, world_size: int, tmp_path: Path
) -> None:
    platform = NvidiaPlatform()
    num_devices = platform.device_count() if platform.is_available().ok else 0
    if num_devices < world_size:
        pytest.skip(f"needs {world_size} NVIDIA GPUs and a torch built for CUDA; has {num_devices}")
    write_tiny_models(tmp_path)
    claims = [*BACKENDS[backend].parallelism, "value_model", "lora", "moe"]
    expected = {model: train_plainly(tmp_path / model) for model in ("qwen3", "qwen3_moe")}
    for size in (1, 2, 4):  # larger worlds read the checkpoints of smaller ones
        if size > world_size:
            continue
        for results in run_ranks(backend, claims, tmp_path, size, "nvidia"):
            for layout, cases in results.items():
                errors = {name: case["error"] for name, case in cases.items() if "error" in case}
                assert not errors, (layout, errors)
                steps = cases["case_trains"]["plain"]
                losses = [
                    loss for loss, _ in expected["qwen3_moe" if "expert" in layout else "qwen3"]
                ]
                assert [row[0] for row in steps] == pytest.approx(losses, abs=LOSS)
