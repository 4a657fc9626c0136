"""A Megatron-Core checkpoint of 2 x 2 ranks becomes a Hugging Face model that fsdp2 continues."""

import json
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rlhf.testing.backend_cases import loss_fn, share
from rlhf.testing.plain_loop import make_batch
from rlhf.testing.tiny_models import write_tiny_models

from engines import collectives
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine
from engines.training.merging import merge_checkpoint
from engines.training.registry import create_engine
from hardware.cpu import CPUPlatform

WORLD_SIZE, NUM_STEPS = 4, 3
DEADLINE_S = 400.0
TRAINING = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_workers": WORLD_SIZE}


def engine_of(model: Path, backend: str, lr: float, **training: object) -> BaseEngine:
    config = TrainingConfig.model_validate({"backend": backend, **training})
    optimizer = OptimizerConfig(lr=lr)
    engine = create_engine("language_model", model, config, optimizer, 10, CPUPlatform(), seed=0)
    engine.initialize()
    return engine


def be_a_rank(model: Path, out: Path, rank: int, port: int) -> None:
    """Train, save, and tell the loss of the next step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    engine = engine_of(model, "megatron", 1e-2, **TRAINING)
    for step in range(NUM_STEPS):
        engine.train_batch(share(engine, make_batch(step)), loss_fn)
    if rank == 0:
        (out / "checkpoint").mkdir()
    dist.barrier()
    engine.save_checkpoint(out / "checkpoint", NUM_STEPS)
    update = engine.train_batch(share(engine, make_batch(NUM_STEPS)), loss_fn)
    if rank == 0:
        (out / "next.json").write_text(json.dumps([update.loss, update.grad_norm]))
    collectives.close_process_group()


@pytest.mark.slow
def test_fsdp2_continues_what_megatron_began(tmp_path: Path) -> None:
    write_tiny_models(tmp_path)
    policy = tmp_path / "policy"
    (policy / "hf").mkdir(parents=True)
    model = tmp_path / "qwen3"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (policy / "hf" / name).write_bytes((model / name).read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(model), str(policy), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        logs = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * WORLD_SIZE, "\n".join(logs)[-6000:]
    merge_checkpoint(policy, tmp_path / "merged", "float32", 1 << 30)
    loss, norm = json.loads((policy / "next.json").read_text())
    update = engine_of(tmp_path / "merged", "fsdp2", 1e-2).train_batch(
        make_batch(NUM_STEPS), loss_fn
    )
    assert update.loss == pytest.approx(loss, abs=1e-5)
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
