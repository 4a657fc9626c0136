"""What saves memory or changes what is trained, on one device, and that no number moves.

Each case has a CPU twin, where the memory part is not looked at. Two engines of one setting are
compared with the plain one: recomputation, activations and shards in host memory, chunked
log-probabilities, fsdp; and the adapter and the value model train and come back from a checkpoint.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.base import PlatformBase

NUM_STEPS = 3
TOLERANCE = {"float32": (2e-4, 1e-3), "bfloat16": (2e-2, 5e-2)}
"""Of a loss (absolute) and of a gradient norm (relative), after three steps."""


def new_engine(
    model_dir: Path, platform: PlatformBase, *, value_model: bool = False, load: bool = True,
    **training: Any,
) -> BaseEngine:  # fmt: skip
    """An initialized engine that trains."""
    chosen = {"dtype": "float32", "gradient_checkpointing": False, **training}
    config = TrainingConfig.model_validate({"collective_timeout_s": 60.0, **chosen})
    engine = create_engine(
        "value_model" if value_model else "language_model",
        model_dir,
        config,
        OptimizerConfig(lr=1e-3, weight_decay=0.1),
        NUM_STEPS,
        platform,
        seed=0,
    )
    engine.initialize(load_weights=load)
    return engine


def make_batch(step: int) -> TokenBatch:
    """Six sequences of 8 to 100 tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(8, 101, (6,), generator=generator).tolist()
    ids = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in lengths]
    return TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * (n - 1) for n in lengths])


def value_loss(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Mean squared error against a value that depends on the token."""
    assert outputs.values_T is not None
    targets_T = (batch.input_ids_T % 5).float()
    errors_T = (outputs.values_T - targets_T) ** 2 * batch.columns["loss_mask"]
    return LossOutput(errors_T.sum() / counts.num_tokens)


def curve(engine: BaseEngine, steps: range = range(NUM_STEPS), loss: Any = None) -> list[Any]:
    """(loss, gradient norm) of each step."""
    found = [engine.train_batch(make_batch(step), loss or SupervisedLoss()) for step in steps]
    return [(update.loss, update.grad_norm) for update in found]


def assert_close(found: list[Any], expected: list[Any], dtype: str) -> None:
    loss, norm = TOLERANCE[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=loss)
        assert ours[1] == pytest.approx(theirs[1], rel=norm)


WAYS: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "activation_offload": {"activation_offload": True},
    "whole_logits": {"chunked_logprobs": False},
    "state_offload": {"param_offload": True, "optimizer_offload": True},
    "cpu_offload": {"options": {"cpu_offload": True}},
    "prefetch": {"options": {"num_prefetched_layers": 2}},
    "fsdp": {"backend": "fsdp"},
    "compiled": {"use_torch_compile": True},
    "liger": {"use_liger": True},
}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_saving_memory_moves_no_number(
    platform: PlatformBase, model_dir: Path, way: str, dtype: str
) -> None:
    if way == "cpu_offload" and platform.device_name != "cpu" and dtype == "float32":
        pytest.skip("one process in float32 is not sharded, so there is no shard to offload")
    if way == "liger":
        pytest.importorskip("liger_kernel", reason="needs liger-kernel: pip install '.[liger]'")
        if platform.device_name == "cpu":
            pytest.skip("Liger's kernels need a GPU; its CPU twin is test_kernels.py")
    if way == "compiled" and platform.device_name == "cpu":
        pytest.skip("needs a C++ compiler; the CPU twin is the contract's case `compiled`")
    plain = curve(new_engine(model_dir, platform, dtype=dtype))
    assert_close(curve(new_engine(model_dir, platform, dtype=dtype, **WAYS[way])), plain, dtype)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_trains_and_comes_back(
    platform: PlatformBase, model_dir: Path, tmp_path: Path, use_dora: bool
) -> None:
    settings = {"dtype": "bfloat16", "lora": LoraConfig(rank=4, alpha=8.0, use_dora=use_dora)}
    engine = new_engine(model_dir, platform, **settings)
    batch = make_batch(9)
    plain = new_engine(model_dir, platform, dtype="bfloat16").infer_batch(batch).logprobs_T
    curve(engine, range(2))
    engine.save_checkpoint(tmp_path, step=2)
    continued = curve(engine, range(2, NUM_STEPS))
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch).logprobs_T, plain)
    assert not torch.equal(engine.infer_batch(batch).logprobs_T, plain)
    resumed = new_engine(model_dir, platform, load=False, **settings)
    resumed.load_checkpoint(tmp_path)
    assert_close(curve(resumed, range(2, NUM_STEPS)), continued, "float32")


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_a_value_model_trains(platform: PlatformBase, model_dir: Path, dtype: str) -> None:
    engine = new_engine(model_dir, platform, value_model=True, dtype=dtype)
    before = engine.infer_batch(make_batch(0)).values_T
    assert before is not None
    assert not before.any()
    steps = curve(engine, loss=value_loss)
    cpu = curve(new_engine(model_dir, platform, value_model=True), loss=value_loss)
    assert_close(steps, cpu, dtype)
    assert steps[-1][0] < steps[0][0]


@pytest.mark.gpu
def test_activations_in_host_memory_free_the_device(model_dir: Path) -> None:
    """Peak memory of a step with long sequences, with and without."""
    from hardware.nvidia import NvidiaPlatform

    platform = NvidiaPlatform()
    if not platform.is_available().ok:
        pytest.skip("needs one NVIDIA GPU and a torch built for CUDA")
    ids = torch.randint(4, 512, (4, 1024)).tolist()
    batch = TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * 1023] * 4)
    peaks = {}
    for offload in (False, True):
        engine = new_engine(model_dir, platform, dtype="bfloat16", activation_offload=offload)
        torch.cuda.reset_peak_memory_stats()
        engine.train_batch(batch, SupervisedLoss())
        peaks[offload] = torch.cuda.max_memory_allocated()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert peaks[True] < 0.8 * peaks[False]
