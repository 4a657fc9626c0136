"""Start ranks that train under the memory audit, be one of them, and compare with formulas.

A model of 109 MB trains, too, where asked for: what was counted then stands beside the resident
memory of the process. glibc has to give freed memory back at once for that, see `EXACT_MALLOC`.
"""

import argparse
import gc
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.forked import start_python_anew
from rlhf.testing.launch import in_groups_of_their_own, launch, rank_arguments
from rlhf.testing.memory_formulas import (
    Shape,
    bucket_bytes,
    hidden_bytes,
    saved_bytes,
    state_bytes,
)
from transformers import AutoConfig, AutoModelForCausalLM

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
PREDICTED = TOKENS - 2
TOLERANCE = 0.05
"""Of what is counted, against resident memory."""
DEADLINE_S = 900.0
SIZES = ((1, 1), (8, 1), (1, 4))
"""Micro-batches of a step, and steps."""
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


def write_models(root: Path) -> None:
    """Write `root/small` and `root/large`."""
    for name, shape in (("small", SMALL), ("large", LARGE)):
        config = AutoConfig.for_model("qwen3", **shape.config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(root / name)


def run_ranks(
    root: Path, num_ranks: int, backends: Sequence[str], resident: Sequence[str]
) -> list[dict[str, Any]]:
    """Train by each backend at all sizes, with recomputed layers and without.

    Args:
        root: directory of the models, and of what the ranks write.
        num_ranks: number of processes, whose environment has `EXACT_MALLOC`.
        backends: their names.
        resident: those whose resident memory is compared.

    Returns:
        For each rank what `main` writes.
    """
    program = ["-m", "rlhf.testing.memory_ranks", f"--root={root}"]
    program += ["--backends", *backends, "--resident", *resident]
    # No fork: the allocator reads its settings once.
    launch(program, num_ranks, root, DEADLINE_S, start=start_python_anew)
    files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def expected(backend: str, *, recompute: bool, num_ranks: int = 1) -> dict[str, int]:
    """What a rank holds of the small model at the peak of a step, without buckets."""
    saved = saved_bytes(SMALL, backend, tokens=TOKENS, predicted=PREDICTED, recompute=recompute)
    return {**state_bytes(SMALL, backend, num_ranks), "saved_bytes": saved}


def counted(found: Mapping[str, int]) -> dict[str, int]:
    """The fields of `expected`."""
    return {name: found[name] for name in expected("fsdp2", recompute=False)}


def check_ranks(ranks: Sequence[dict[str, Any]]) -> None:
    """Compare what `run_ranks` returned with formulas and with resident memory."""
    for name, found in ((name, rank[name]) for rank in ranks for name in rank):
        if name.startswith("resident"):
            _, backend, recompute = name.split()
            hidden = hidden_bytes(LARGE, backend, len(ranks), recompute=recompute == "True")
            known = found["counted"] + hidden
            assert known == pytest.approx(found["resident"], rel=TOLERANCE), name
    for name, found in ranks[0].items():
        if not name.startswith("resident"):
            _check_counts(name, [rank[name]["train"] for rank in ranks])
            _check_rests(name, found)


def _check_counts(name: str, ranks: Sequence[dict[str, int]]) -> None:
    backend, recompute, *_ = name.split()
    wanted = expected(backend, recompute=recompute == "True", num_ranks=len(ranks))
    trained = [counted(rank) for rank in ranks]
    if backend == "megatron":
        moments = sum(each["moment_bytes"] for each in trained)
        trained = [{**each, "moment_bytes": moments} for each in trained]
    assert trained == [wanted] * len(ranks), name
    if len(ranks) > 1 and backend not in ("fsdp", "megatron"):
        buckets = bucket_bytes(SMALL, backend, len(ranks))
        assert ranks[0]["bucket_bytes"] == buckets, name


def _check_rests(name: str, found: Mapping[str, Mapping[str, int]]) -> None:
    """After a step nothing is left of it, but for Megatron's buffer of gradients."""
    is_megatron = name.startswith("megatron")
    kept = expected("megatron", recompute=False)["gradient_bytes"] if is_megatron else 0
    for phase in ("infer", "sync", "left"):
        idle = found[phase]
        assert (idle["gradient_bytes"], idle["saved_bytes"]) == (kept, 0), (name, phase)
    assert found["left"]["bucket_bytes"] == 0, name


def main(args: argparse.Namespace) -> None:
    """Be one rank: write counts by `backend recompute micro-batches steps`, and resident memory."""
    results: dict[str, Any] = {}
    layouts = [(backend, recompute) for backend in args.backends for recompute in (False, True)]
    for backend, recompute in in_groups_of_their_own(args, "cpu", layouts):
        layout = {"backend": backend, "gradient_checkpointing": recompute}
        engine = make_engine(args.root / "small", args.world_size, **layout)
        for num_micro_batches, num_steps in SIZES:
            name = f"{backend} {recompute} {num_micro_batches} {num_steps}"
            results[name] = audited(engine, num_micro_batches, num_steps)
        del engine
        if backend in args.resident:
            name = f"resident {backend} {recompute}"
            results[name] = resident(args.root, args.world_size, **layout)
    (args.root / f"results-{args.world_size}-{args.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--backends", nargs="+", required=True)
    parser.add_argument("--resident", nargs="*", default=[])
    main(parser.parse_args())
