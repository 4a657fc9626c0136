"""Streaming holds one tensor, exporting and merging hold one file's worth, never the model.

Run with arguments, this file is a rank that measures: how far its anonymous memory (RssAnon)
rises during an action. Pages of mapped files are not in it; the kernel can drop those.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rlhf.testing.forked import start_python_anew
from rlhf.testing.launch import join_group, launch, rank_arguments
from transformers import AutoModelForCausalLM, Qwen3Config

from engines import collectives
from engines.checkpoint.export import write_model
from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.merging import merge_checkpoint
from engines.training.base import BaseEngine, create_engine
from hardware.cpu import CPUPlatform

CONFIG = Qwen3Config(
    vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=5,
    num_attention_heads=8, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
"""48 M weights."""
MIB = 1 << 20
LAYERS = 180 * MIB
TENSOR = 8 * MIB
"""The largest ones in float32: three in each layer."""
SHARD = 3 * TENSOR
GLOO = TENSOR
"""gloo gathers into a buffer of its own and copies from there."""
SLACK = 4 * MIB
"""Python objects, the allocator's remainders, and what the kernel counts late."""
BOUNDS = {
    1: {"merge to float32": SHARD, "merge to bfloat16": SHARD, "stream": TENSOR, "export": SHARD},
    2: {"stream": TENSOR + GLOO, "export": SHARD + GLOO},
}
"""World size -> what is done -> how far memory may rise. One rank has an adapter to merge in:
without it, a weight that is streamed is the engine's own and costs nothing."""
LAYOUTS = {
    "fsdp2": dict[str, int](),
    "megatron": {"tensor_parallel_size": 2},
}
"""Backend -> how two ranks share the weights."""
DEADLINE_S = 120.0
_WATCHER = """
import select, sys
def read():
    with open(f"/proc/{sys.argv[1]}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))
start = peak = read()
print("started", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    peak = max(peak, read())
print((max(peak, read()) - start) * 1024)
"""
"""A process of its own: a thread would wait for Python's lock while memory is copied under it."""


def rise_during(action: Callable[[], object]) -> int:
    """Bytes by which this process's anonymous memory rose at most.

    What the action returns is held until the last reading: where other processes take the
    cores, the watcher may not have had a turn since the action's last allocation.
    """
    argv = [sys.executable, "-I", "-S", "-c", _WATCHER, str(os.getpid())]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        held = action()
        rise = int(watcher.communicate("")[0])
        del held
        return rise


def measured(engine: BaseEngine, root: Path) -> dict[str, int]:
    """Rises of what an engine does with its weights."""

    def stream() -> None:
        for _, tensor in engine.get_per_tensor_param():
            del tensor

    def export() -> None:
        out = root / f"exported-{engine.world_size}-{engine.rank}"
        write_model(engine.get_per_tensor_param(), root / "policy/hf", out, "float32", SHARD)

    next(engine.get_per_tensor_param())  # what is imported and built once
    return {
        "stream": rise_during(stream),
        "export": rise_during(export),
        "hold": rise_during(lambda: list(engine.get_per_tensor_param())),
    }


def merged(policy: Path) -> dict[str, int]:
    """Rises of merging a checkpoint, in a process that has no engine."""
    next(FSDP2Engine.stored_weights(policy / "checkpoint", policy / "hf"))
    return {
        f"merge to {dtype}": rise_during(
            lambda dtype=dtype: merge_checkpoint(policy, policy.parent / dtype, dtype, SHARD)
        )
        for dtype in ("float32", "bfloat16")
    }


def engine_of(backend: str, model: Path, world_size: int) -> BaseEngine:
    """One rank trains an adapter, two hold the weights alone."""
    alone = world_size == 1
    layout = {} if alone else LAYOUTS[backend]
    engine = create_engine(
        "language_model",
        model,
        TrainingConfig(
            backend=backend,
            num_workers=world_size,
            lora=LoraConfig(rank=8) if alone else None,
            **layout,
        ),
        OptimizerConfig() if alone else None,
        10,
        CPUPlatform(),
        seed=0,
    )
    engine.initialize()
    return engine


def main() -> None:
    """Be a rank."""
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    args = parser.parse_args()
    join_group(args)
    policy = args.root / "policy"
    results = merged(policy) if args.world_size == 1 else {}
    engine = engine_of(args.backend, args.root / "model", args.world_size)
    results |= measured(engine, args.root)
    if args.world_size > 1:
        engine.save_checkpoint(policy / "checkpoint", step=1)
    path = args.root / f"rises-{args.world_size}-{args.rank}.json"
    path.write_text(json.dumps(results))
    collectives.close_process_group()


@pytest.fixture(scope="module", params=LAYOUTS)
def rises(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, list[dict[str, int]]]]:
    """World size -> for each rank what it measured; one rank merges what two have saved."""
    root = tmp_path_factory.mktemp("memory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(root / "model")
    (root / "policy" / "hf").mkdir(parents=True)
    (root / "policy" / "checkpoint").mkdir()
    shutil.copy(root / "model" / "config.json", root / "policy" / "hf")
    found: dict[int, list[dict[str, int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        # Freed tensors go back to the kernel at once, so a peak is what was held together.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        for size in (2, 1):
            arguments = [f"--root={root}", f"--backend={request.param}"]
            # The allocator asks for that when a process starts.
            launch([__file__, *arguments], size, root, DEADLINE_S, start=start_python_anew)
            files = [root / f"rises-{size}-{rank}.json" for rank in range(size)]
            found[size] = [json.loads(file.read_text()) for file in files]
    yield found
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_rises_by_a_tensor_or_a_file(
    rises: dict[int, list[dict[str, int]]], world_size: int
) -> None:
    bounds = BOUNDS[world_size]
    assert max(bounds.values()) + SLACK < LAYERS / 4
    for rank in rises[world_size]:
        assert rank["hold"] > 0.95 * LAYERS, "a walk that keeps everything must be seen"
        above = {name: (rank[name] - bound) / MIB for name, bound in bounds.items()}
        assert max(above.values()) < SLACK / MIB, f"MiB above the bounds: {above}"


if __name__ == "__main__":
    main()
