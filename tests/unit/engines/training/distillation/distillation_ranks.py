"""One of two ranks that distil under every layout; run as a program, writes its results."""

import json
import traceback
from pathlib import Path
from typing import Any

import torch
from distillation_cases import (
    VOCABULARY,
    in_small_tiles,
    make_engine,
    steps_of,
    taught,
)
from rlhf.testing.context import share
from rlhf.testing.launch import join_group, rank_arguments
from rlhf.testing.plain_loop import make_batch, without_mask

from engines import collectives
from engines.algorithms.distillation import TopKDistillation
from engines.types import Readouts

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp": {"backend": "fsdp"},
    "ulysses": {"backend": "fsdp2", "ulysses_size": 2},
    "tensor": {"backend": "megatron", "tensor_parallel_size": 2},
    "pipeline": {"backend": "megatron", "pipeline_parallel_size": 2},
    "context": {"backend": "megatron", "context_parallel_size": 2},
}
SMALL = {"max_tokens_per_micro_batch": 24}
NUM_TOP = 5


def of_layout(root: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Steps at K = V, at a smaller K, from a teacher that is the student, and what it reads."""
    shape: dict[str, Any] = {"num_workers": 2, **layout, **SMALL}
    teacher = make_engine(root / "teacher", frozen=True, **shape)
    results: dict[str, Any] = {
        str(num_top): steps_of(make_engine(root / "student", **shape), teacher, num_top)
        for num_top in (VOCABULARY, NUM_TOP)
    }
    student = make_engine(root / "student", **shape)
    own = taught(student, share(student, make_batch(0)), NUM_TOP)
    update = student.train_batch(own, TopKDistillation())
    results["of itself"] = [update.loss, update.grad_norm]
    everything = without_mask(make_batch(0))
    top = teacher.infer_batch(everything, Readouts(num_top=NUM_TOP))
    everything = everything.with_columns(asked=top.topk_ids_TK)
    again = teacher.infer_batch(everything, Readouts(entropy=True, logprobs_of="asked"))
    return results | {
        "ids": top.topk_ids_TK.tolist(),
        "logprobs": top.topk_logprobs_TK.tolist(),
        "asked alike": torch.equal(again.topk_logprobs_TK, top.topk_logprobs_TK),
        "sampled alike": torch.equal(again.logprobs_T, top.logprobs_T),
    }


def main() -> None:
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    in_small_tiles()
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        try:
            results[name] = of_layout(args.root, layout)
        except Exception:  # noqa: BLE001 (the boundary of a test process)
            results[name] = {"error": traceback.format_exc()}
            break
    path = args.root / f"results-{args.rank}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
