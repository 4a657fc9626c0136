"""The Megatron engine on real devices: Megatron-Core's CUDA paths, NCCL, TransformerEngine.

One GPU: training equals a plain transformers loop, bfloat16 stays close, offloading changes no
number. Several GPUs: the backend contract over NCCL. TransformerEngine: its layers against
Megatron-Core's own. The CPU twin keeps the cases honest where no GPU is.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.context import train
from rlhf.testing.plain_loop import EPS, LR, WEIGHT_DECAY, train_plainly
from rlhf.testing.tiny_models import write_tiny_models

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from hardware.base import PlatformBase
from hardware.nvidia import NvidiaPlatform

pytestmark = pytest.mark.skipif(
    # Not imported: on a CPU that is the platform's to do.
    importlib.util.find_spec("mbridge") is None,
    reason="needs megatron-core and mbridge (extra megatron)",
)
OPTIMIZER = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    write_tiny_models(root)
    return root


def new_engine(path: Path, platform: PlatformBase, **training: Any) -> BaseEngine:
    chosen = {"dtype": "float32", "gradient_checkpointing": False, **training}
    config = TrainingConfig.model_validate({"backend": "megatron", **chosen})
    engine = create_engine("language_model", path, config, OPTIMIZER, 100, platform, seed=0)
    engine.initialize()
    return engine


def numbers(rows: list[list[float]], column: int) -> list[float]:
    return [row[column] for row in rows]


@pytest.mark.parametrize("model", ["qwen3", "llama", "qwen3_moe"])
def test_trains_as_a_plain_loop_does(platform: PlatformBase, root: Path, model: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        steps = train(new_engine(root / model, platform))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    expected = train_plainly(root / model)
    assert numbers(steps, 0) == pytest.approx([loss for loss, _ in expected], abs=2e-4)
    assert numbers(steps, 1) == pytest.approx([norm for _, norm in expected], rel=1e-3)


def test_bfloat16_stays_close(platform: PlatformBase, root: Path) -> None:
    """On a GPU this runs the fused packed attention."""
    exact = train(new_engine(root / "llama", platform))
    steps = train(new_engine(root / "llama", platform, dtype="bfloat16"))
    assert numbers(steps, 0) == pytest.approx(numbers(exact, 0), abs=0.03)
    assert numbers(steps, 1) == pytest.approx(numbers(exact, 1), rel=0.06)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_number(platform: PlatformBase, root: Path, dtype: str) -> None:
    plain = train(new_engine(root / "qwen3", platform, dtype=dtype))
    engine = new_engine(
        root / "qwen3", platform, dtype=dtype, param_offload=True, optimizer_offload=True
    )
    weights = {name: tensor.cpu().clone() for name, tensor in engine.get_per_tensor_param()}
    again = {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
    for ours, theirs in zip(train(engine), plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.gpu
def test_transformer_engine_layers(root: Path) -> None:
    available = NvidiaPlatform().is_available()
    if not available.ok:
        pytest.skip(f"needs one NVIDIA GPU and a torch built for CUDA: {available.reason}")
    pytest.importorskip("transformer_engine", reason="needs transformer_engine[pytorch]")
    platform = NvidiaPlatform()
    for model in ("qwen3", "qwen3_moe"):
        own = train(new_engine(root / model, platform, dtype="bfloat16"))
        theirs = train(
            new_engine(
                root / model, platform, dtype="bfloat16", options={"transformer_engine": True}
            )
        )
        assert numbers(theirs, 0) == pytest.approx(numbers(own, 0), abs=0.05)
        assert numbers(theirs, 1) == pytest.approx(numbers(own, 1), rel=0.1)
