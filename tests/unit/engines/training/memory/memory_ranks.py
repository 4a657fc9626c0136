"""One of several ranks that train under the audit; run as a program, writes what was counted.

With `--resident BACKEND ...`, a model of 109 MB trains, too, and what was counted stands beside the
resident memory of the process. glibc has to give freed memory back at once, see `EXACT_MALLOC`.
"""

import argparse
import gc
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_formulas import Shape
from rlhf.testing.launch import in_groups_of_their_own, rank_arguments

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.training.memory_audit import MemoryAudit
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
SMALL = Shape()
LARGE = Shape(vocabulary=8192, width=512, layers=6, heads=8, kv_heads=4, head_dim=64, inner=1536)
TOKENS, LARGE_TOKENS = 64, 256
"""Of a micro-batch: two sequences of equal length."""
SIZES = ((1, 1), (8, 1), (1, 4))
"""Micro-batches of a step, and steps."""
BACKENDS = ("fsdp2", "fsdp", "megatron")
LAYOUTS = [(backend, recompute) for backend in BACKENDS for recompute in (False, True)]
Loss = Callable[[ModelOutputs, TokenBatch, GlobalCounts], LossOutput]


def likelihood(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """The loss of SFT; keeps the mask and nothing else."""
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def make_engine(hf_dir: Path, num_ranks: int = 1, **training: Any) -> BaseEngine:
    settings = {"num_workers": num_ranks, "max_tokens_per_micro_batch": TOKENS, **training}
    engine = create_engine(
        "language_model", hf_dir, TrainingConfig(**settings), OptimizerConfig(lr=1e-3), 10,
        CPUPlatform(), 0,
    )  # fmt: skip
    engine.initialize()
    return engine


def draw_batch(num_micro_batches: int, tokens: int = TOKENS) -> TokenBatch:
    length, draw = tokens // 2, torch.Generator().manual_seed(0)
    shape = (2 * num_micro_batches, length)
    ids = torch.randint(2, SMALL.vocabulary, shape, generator=draw).tolist()
    return TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * (length - 1) for _ in ids])


def audited(
    engine: BaseEngine, num_micro_batches: int = 1, num_steps: int = 1, loss: Loss = likelihood
) -> dict[str, dict[str, Any]]:
    """Train, evaluate and send the weights; return each phase's fields, and what is left."""
    audit = MemoryAudit(lambda: [engine], engine.spec.platform)
    for _ in range(num_steps):
        with audit.phase("train"):
            engine.train_batch(draw_batch(num_micro_batches), loss)
    found = {"train": asdict(audit.phases.pop("train").largest)}
    with audit.phase("train"):
        engine.infer_batch(draw_batch(num_micro_batches))
    with audit.phase("sync"):
        deque(engine.get_per_tensor_param(), maxlen=0)
    gc.collect()
    found["infer"] = asdict(audit.phases["train"].largest)
    found["sync"] = asdict(audit.phases["sync"].largest)
    return {**found, "left": asdict(audit.held())}


def resident(root: Path, num_ranks: int, **training: Any) -> dict[str, int]:
    """Bytes at the peak of a step, in which a second micro-batch runs beside gradients."""
    gc.collect()
    before = CPUPlatform().memory_allocated_bytes()
    settings = {"max_tokens_per_micro_batch": LARGE_TOKENS, **training}
    engine = make_engine(root / "large", num_ranks, **settings)
    audit = MemoryAudit(lambda: [engine], engine.spec.platform)
    with audit.phase("train"):
        engine.train_batch(draw_batch(2, LARGE_TOKENS), likelihood)
    found = audit.phases["train"]
    return {"counted": found.counted_bytes, "resident": found.system_bytes - before}


def main(args: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    for backend, recompute in in_groups_of_their_own(args, "cpu", LAYOUTS):
        layout = {"backend": backend, "gradient_checkpointing": recompute}
        engine = make_engine(args.root / "small", args.world_size, **layout)
        for num_micro_batches, num_steps in SIZES:
            name = f"{backend} {recompute} {num_micro_batches} {num_steps}"
            results[name] = audited(engine, num_micro_batches, num_steps)
        del engine
        # In one process fsdp is the same as fsdp2.
        if not recompute and backend in args.resident:
            results[f"resident {backend}"] = resident(args.root, args.world_size, **layout)
    (args.root / f"results-{args.world_size}-{args.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--resident", nargs="*", default=[])
    main(parser.parse_args())
