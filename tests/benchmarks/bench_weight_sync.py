"""Weight sync inside one process, checksums on both sides, against a plain copy of the bytes.

A model of 65 M parameters, 0.26 GB in float32. Four figures, in turn: one sync into a rollout
engine in float32 and one in bfloat16, and for each `torch.Tensor.copy_` of the bytes that arrive,
tensor by tensor between memory that is already there. At best a sync reads the weights to hash
them, copies them, and reads what arrived; in bfloat16 it casts them from float32 before that.

Run: python tests/benchmarks/bench_weight_sync.py [--repeats N] [--threads N]
"""

import gc
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from measure import arguments, ratio_line, take_turns, turn_by_turn
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from engines.config.rollout import RolloutConfig
from engines.rollout.service import RolloutService
from engines.rollout.transformers.engine import TransformersEngine
from engines.weight_sync.in_process import new_transport
from hardware.cpu import CPUPlatform

GOAL = 0.4
MIN_REPEATS = 7


def make_weights(directory: Path) -> dict[str, Tensor]:
    """Random weights by name; their configuration is written to `directory`."""
    config = Qwen3Config(
        vocab_size=32_768,
        hidden_size=640,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        intermediate_size=1664,
        tie_word_embeddings=True,
    )
    config.save_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


SYNC_TIMEOUT_S = 60.0


def syncs(directory: Path, weights: dict[str, Tensor], dtype: str) -> Callable[[], float]:
    """A function that sends the weights once more and says how long it took."""
    engine = TransformersEngine(directory, RolloutConfig(), dtype, CPUPlatform())
    service = RolloutService([engine], SYNC_TIMEOUT_S)
    transport = new_transport(directory, dtype, SYNC_TIMEOUT_S)
    versions = count()

    def sync() -> float:
        start = time.perf_counter()
        service.sync(transport, lambda to: to.send(iter(weights.items())), next(versions))
        return time.perf_counter() - start

    return sync


def copies(weights: dict[str, Tensor]) -> Callable[[], float]:
    """A function that copies the weights and says how long it took."""
    own = {name: tensor.clone() for name, tensor in weights.items()}

    def copy() -> float:
        start = time.perf_counter()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        return time.perf_counter() - start

    return copy


def main() -> None:
    """Measure and print."""
    chosen = arguments(__doc__, peer=False)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        gc.freeze()  # as jobs do
        weights = make_weights(Path(name))
        halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        taken = take_turns(
            {
                "sync in float32": syncs(Path(name), weights, "float32"),
                "copy in float32": copies(weights),
                "sync in bfloat16": syncs(Path(name), weights, "bfloat16"),
                "copy in bfloat16": copies(halves),
            },
            max(chosen.repeats, MIN_REPEATS),
        )
    size_gb = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    for what, measured in taken.items():
        arrived_gb = size_gb if "float32" in what else size_gb / 2
        print(f"  {what}: {measured.text('s')}, {arrived_gb / measured.median:.2f} GB/s")
    for dtype, goal in (("float32", GOAL), ("bfloat16", None)):
        ratio = turn_by_turn(taken[f"copy in {dtype}"], taken[f"sync in {dtype}"])
        print(ratio_line(f"sync in {dtype} against a copy", ratio, goal))


if __name__ == "__main__":
    main()
