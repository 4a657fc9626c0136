"""The FSDP engines on one device against a plain transformers loop, in float32 and bfloat16.

The reference is one sequence at a time, without any of our code: its bfloat16 form keeps float32
weights and casts them for each forward pass. Also covered: checkpoints continue, and offloading
moves memory but no number. Several ranks: `test_several_devices` (NCCL refuses two on one GPU).
"""

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch, TrainMetrics
from hardware.base import PlatformBase

NUM_STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
DTYPES = ("float32", "bfloat16")
BACKENDS = ("fsdp", "fsdp2")
KEPT: dict[str, dict[str, Any]] = {
    "on_device": {},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
    "cpu_offload": {"options": {"cpu_offload": True}},
}
"""Where an engine keeps its state between steps."""


def new_engine(
    model_dir: Path, platform: PlatformBase, dtype: str, *, load: bool = True, **training: Any
) -> BaseEngine:
    """An initialized engine that trains."""
    config = TrainingConfig.model_validate(
        {"dtype": dtype, "collective_timeout_s": 60.0, **training}
    )
    engine = create_engine(
        "language_model", model_dir, config, OPTIMIZER, NUM_STEPS, platform, seed=0
    )
    engine.initialize(load_weights=load)
    return engine


def sequences(step: int) -> tuple[list[list[int]], list[list[float]]]:
    """Eight sequences of 2 to 120 tokens and their loss masks; one is not trained on."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 121, (8,), generator=generator).tolist()
    ids = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in lengths]
    masks = [[float(t >= max(1, n // 3)) for t in range(n)] for n in lengths]
    masks[4] = [0.0] * lengths[4]
    return ids, masks


def train(engine: BaseEngine, steps: range) -> list[TrainMetrics]:
    """Our engine's optimizer steps."""
    results = []
    for step in steps:
        ids, masks = sequences(step)
        batch = TokenBatch.from_sequences(ids, loss_mask=masks)
        results.append(engine.train_batch(batch, SupervisedLoss()))
    return results


def reference(
    model_dir: Path, device: torch.device, dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping of the plain loop."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to(device).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(NUM_STEPS):
        ids, masks = sequences(step)
        num_tokens = sum(map(sum, masks))
        optimizer.zero_grad()
        loss = 0.0
        for row, mask in zip(ids, masks, strict=True):
            if any(mask):
                share = negative_log_likelihood(model, row, mask, device, dtype) / num_tokens
                share.backward()
                loss += float(share)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, OPTIMIZER.max_grad_norm / (norm + 1e-6)))
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    return losses, norms


def negative_log_likelihood(
    model: torch.nn.Module, row: list[int], mask: list[float], device: torch.device,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Summed over the tokens of one sequence that are trained on."""
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    ids = torch.tensor([row], device=device)
    logits = functional_call(model, cast, kwargs={"input_ids": ids, "use_cache": False}).logits
    logprobs = logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return -(logprobs * torch.tensor(mask[1:], device=device)).sum()


def losses_and_norms(results: list[TrainMetrics]) -> tuple[list[float], list[float]]:
    return [r.loss for r in results], [r.grad_norm for r in results]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_equals_a_plain_loop(
    platform: PlatformBase, model_dir: Path, dtype: str, checkpointing: bool, backend: str
) -> None:
    engine = new_engine(
        model_dir, platform, dtype, backend=backend,
        gradient_checkpointing=checkpointing, max_tokens_per_micro_batch=200,
    )  # fmt: skip
    losses, norms = losses_and_norms(train(engine, range(NUM_STEPS)))
    expected, expected_norms = reference(model_dir, platform.device(), getattr(torch, dtype))
    precise = dtype == "float32"
    assert losses == pytest.approx(expected, abs=2e-5 if precise else 5e-3)
    assert norms == pytest.approx(expected_norms, rel=2e-4 if precise else 2e-2)


def test_bfloat16_stays_close_to_float32(platform: PlatformBase, model_dir: Path) -> None:
    engine = new_engine(model_dir, platform, "bfloat16")
    losses, norms = losses_and_norms(train(engine, range(NUM_STEPS)))
    expected, expected_norms = reference(model_dir, platform.device(), torch.float32)
    assert losses == pytest.approx(expected, abs=2e-2)
    assert norms == pytest.approx(expected_norms, rel=5e-2)
    assert losses != expected, "bfloat16 computes as float32 does"


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_does_not_change_logprobs(
    platform: PlatformBase, model_dir: Path, dtype: str
) -> None:
    engine = new_engine(model_dir, platform, dtype)
    batch = TokenBatch.from_sequences(sequences(0)[0])
    packed = engine.infer_batch(batch).logprobs_T
    alone = torch.cat(
        [engine.infer_batch(batch.select([i])).logprobs_T for i in range(batch.num_sequences)]
    )
    assert float((packed - alone).abs().max()) < (2e-5 if dtype == "float32" else 5e-2)


def files(directory: Path) -> dict[str, bytes]:
    """Content of every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("kept", "backend"),
    [*((kept, backend) for kept in ("on_device", "offloaded") for backend in BACKENDS),
     ("cpu_offload", "fsdp2")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_continue(
    platform: PlatformBase, model_dir: Path, dtype: str, kept: str, backend: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backend": backend, **KEPT[kept]}
    engine = new_engine(model_dir, platform, dtype, **options)
    train(engine, range(2))
    (first := tmp_path / "first").mkdir()
    engine.save_checkpoint(first, step=2)
    drawn = torch.rand(4, device=platform.device())
    continued, continued_norms = losses_and_norms(train(engine, range(2, NUM_STEPS)))

    resumed = new_engine(model_dir, platform, dtype, load=False, **options)
    assert resumed.load_checkpoint(first) == 2
    (second := tmp_path / "second").mkdir()
    resumed.save_checkpoint(second, step=2)
    assert files(second) == files(first), "weights, moments, counters or generators differ"
    assert torch.equal(torch.rand(4, device=platform.device()), drawn)
    losses, norms = losses_and_norms(train(resumed, range(2, NUM_STEPS)))
    if platform.device_name == "cpu":
        assert (losses, norms) == (continued, continued_norms)
    # On a GPU the backward pass adds up in any order; the first forward pass does not.
    assert losses[0] == pytest.approx(continued[0], rel=1e-6)
    assert losses == pytest.approx(continued, rel=1e-5 if dtype == "float32" else 2e-3)
    assert norms == pytest.approx(continued_norms, rel=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_offloading_moves_memory_and_no_number(
    platform: PlatformBase, model_dir: Path, dtype: str
) -> None:
    resident = new_engine(model_dir, platform, dtype)
    expected, expected_norms = losses_and_norms(train(resident, range(NUM_STEPS)))
    weights = {name: tensor.cpu() for name, tensor in resident.get_per_tensor_param()}
    held_bytes = sum(t.numel() * t.element_size() for t in weights.values())
    del resident

    engine = new_engine(model_dir, platform, dtype, param_offload=True, optimizer_offload=True)
    losses, norms = losses_and_norms(train(engine, range(NUM_STEPS)))
    if platform.device_name != "cpu":
        gc.collect()
        idle_bytes = platform.memory_allocated_bytes()
        with engine.train_mode():
            held = platform.memory_allocated_bytes() - idle_bytes
            assert held_bytes <= held < 2 * held_bytes, "no moments yet"
            with engine._optimizer_scope():
                assert platform.memory_allocated_bytes() - idle_bytes >= 3 * held_bytes
        assert platform.memory_allocated_bytes() - idle_bytes < held_bytes / 2
        assert isinstance(engine, FSDP2Engine)
        assert {p.device.type for p in engine.model.parameters()} == {"cpu"}
    precise = dtype == "float32"
    assert losses == pytest.approx(expected, rel=1e-5 if precise else 2e-3)
    assert norms == pytest.approx(expected_norms, rel=1e-4 if precise else 2e-2)
    largest = max(
        float((tensor.cpu() - weights[name]).abs().max())
        for name, tensor in engine.get_per_tensor_param()
    )
    # One Adam step moves a weight by at most about the learning rate, whatever the gradient.
    assert largest == 0 if platform.device_name == "cpu" else largest < 2 * OPTIMIZER.lr
