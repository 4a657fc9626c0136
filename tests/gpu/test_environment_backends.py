"""The backends with job environments of their own, on one device, against a plain loop.

Run in the environment of the backend, with a torch built for the device:
`.envs/veomni/bin/python -m pytest tests/gpu/test_environment_backends.py -m gpu`. The CPU half is
what the contract tests do at length; here it keeps the cases honest.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.algorithms.supervised import SupervisedLoss
from engines.config.backends import BACKENDS
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.base import PlatformBase

NUM_STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.0, max_grad_norm=1.0)
OWN = [name for name, backend in BACKENDS.items() if backend.environment is not None]


def new_engine(backend: str, model_dir: Path, platform: PlatformBase, dtype: str) -> BaseEngine:
    library = BACKENDS[backend].requires
    if library is None or importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: run with .envs/{backend}/bin/python (make env-{backend})")
    config = TrainingConfig.model_validate(
        {"backend": backend, "dtype": dtype, "collective_timeout_s": 60.0}
    )
    engine = create_engine(
        "language_model", model_dir, config, OPTIMIZER, NUM_STEPS, platform, seed=0
    )
    engine.initialize()
    return engine


def sequences(step: int) -> list[list[int]]:
    """Eight sequences of 2 to 120 tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 121, (8,), generator=generator).tolist()
    return [torch.randint(4, 512, (n,), generator=generator).tolist() for n in lengths]


def plain_losses(model_dir: Path) -> list[float]:
    """Token-mean losses of the same steps by transformers and torch alone, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        rows = sequences(step)
        optimizer.zero_grad()
        total = torch.zeros(())
        for row in rows:
            ids = torch.tensor(row)
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        loss = total / sum(len(row) - 1 for row in rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("backend", OWN)
def test_trains_as_a_plain_loop_does(
    backend: str, dtype: str, tolerance: float, model_dir: Path, platform: PlatformBase
) -> None:
    engine = new_engine(backend, model_dir, platform, dtype)
    losses = []
    for step in range(NUM_STEPS):
        rows = sequences(step)
        masks = [[0.0] + [1.0] * (len(row) - 1) for row in rows]
        batch = TokenBatch.from_sequences(rows, loss_mask=masks)
        losses.append(engine.train_batch(batch, SupervisedLoss()).loss)
    assert losses == pytest.approx(plain_losses(model_dir), abs=tolerance)
    exported = dict(engine.get_per_tensor_param())
    assert {tensor.device.type for tensor in exported.values()} == {platform.device_name}
    batch = TokenBatch.from_sequences(sequences(0))
    assert torch.isfinite(engine.infer_batch(batch).logprobs_T).all()
