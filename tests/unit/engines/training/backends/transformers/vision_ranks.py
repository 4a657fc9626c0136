"""One rank of the vision-language cases; run as a program, writes its results as JSON."""

import json
from pathlib import Path
from typing import Any

from adapter_files import write_adapter
from rlhf.testing.context import OPTIMIZER
from rlhf.testing.launch import join_group, rank_arguments
from safetensors.torch import save_file
from vision_cases import IMAGE, NUM_STEPS, Grid, make_batch, sft

from engines import collectives
from engines.config.training import LoraConfig, TrainingConfig
from engines.errors import EngineError
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

TIMEOUT_S = 30.0
BACKENDS = ("fsdp2", "fsdp")
SMALL: list[Grid] = [(1, 2, 4)]
ROWS: dict[str, tuple[list[list[Grid]], list[list[Grid]]]] = {
    "images": ([SMALL, [(1, 4, 4)]], [[(1, 2, 2)], [(1, 2, 4), (1, 6, 4)]]),
    "mixed": ([SMALL, [], []], [[], [(1, 2, 4), (1, 6, 4)]]),
    "one_rank_sees": ([[(1, 4, 4)], SMALL, []], [[], [], []]),
    "other_rank_sees": ([[], []], [[(1, 4, 4)], SMALL, SMALL]),
    "text": ([[], []], [[], [], []]),
    "shared": ([SMALL, [(1, 2, 4), (1, 4, 4)]], [[]]),
}
"""Images of the sequences of each rank."""
AGAIN = {"shared": ((0, 1, 0, 1, 0), (2, 2))}
"""Which of both ranks' sequences each has, where one comes again: they share its images."""
WHOLE = {"max_tokens_per_micro_batch": 200}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ROWS if name != "shared"},
    "shared": ("shared", WHOLE),
    "shared_recomputed": ("shared", {**WHOLE, "gradient_checkpointing": True}),
    "shared_frozen": ("shared", {**WHOLE, "frozen_parameters": ("model.visual.*",)}),
    "shared_bfloat16": ("shared", {**WHOLE, "dtype": "bfloat16"}),
    "frozen": ("one_rank_sees", {"frozen_parameters": ("model.visual.*",)}),
    "recomputed": ("one_rank_sees", {"gradient_checkpointing": True}),
    "all_logits": ("mixed", {"chunked_logprobs": False}),
    "compiled": ("mixed", {"use_torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "one_micro_batch": ("mixed", {"max_tokens_per_micro_batch": 200}),
    "offload": ("other_rank_sees", {"param_offload": True, "optimizer_offload": True}),
    "lora": ("one_rank_sees", {"lora": LoraConfig(rank=4, alpha=8.0)}),
    "bfloat16": ("one_rank_sees", {"dtype": "bfloat16"}),
}
"""Name -> whose images, and settings."""
QUICK = {
    "fsdp2": ("mixed", "one_rank_sees", "frozen", "shared", "refused"),
    "fsdp": ("other_rank_sees",),
}
"""Backend -> what is tried in seconds."""
SLOW = {
    backend: tuple(name for name in (*CASES, "continued", "refused") if name not in QUICK[backend])
    for backend in BACKENDS
}
"""The rest."""


def shares(name: str, step: int) -> list[TokenBatch]:
    """The sequences of each rank in the batch of a step."""
    first, second = ROWS[name]
    num = len(first) + len(second)
    batch = make_batch(step, [*first, *second])
    own = AGAIN.get(name, (range(len(first)), range(len(first), num)))
    return [batch.select(sequences) for sequences in own]


def own_share(name: str, step: int, rank: int) -> TokenBatch:
    """Those of one rank."""
    return shares(name, step)[rank]


class Rank:
    """Makes engines and runs the cases."""

    def __init__(self, root: Path, rank: int, backend: str) -> None:
        self.root, self.rank, self.backend = root, rank, backend

    def engine(self, *, load_weights: bool = True, **training: Any) -> BaseEngine:
        """An engine over both ranks."""
        settings = {"max_tokens_per_micro_batch": 30, **training}
        config = TrainingConfig(
            backend=self.backend, num_workers=2, collective_timeout_s=TIMEOUT_S, **settings
        )
        engine = create_engine(
            "language_model", self.root / "model", config, OPTIMIZER, 10, CPUPlatform(), 0
        )
        engine.initialize(load_weights=load_weights)
        return engine

    def run(self, name: str) -> Any:
        """The results of a case."""
        if name in CASES:
            return self.trained(name)
        return self.continued() if name == "continued" else self.refused()

    def trained(self, name: str) -> Any:
        """(loss, gradient norm) of each step, and log-probabilities before them."""
        whose, training = CASES[name]
        engine = self.engine(**training)
        if name == "lora":
            path = self.root / f"adapter-{self.backend}"
            path.mkdir(exist_ok=True)
            write_adapter(engine, path)
        share = own_share(whose, 0, self.rank)
        logprobs = engine.infer_batch(share).logprobs_T.tolist()
        steps = []
        for step in range(NUM_STEPS):
            update = engine.train_batch(own_share(whose, step, self.rank), sft)
            steps.append((update.loss, update.grad_norm))
        if name == "mixed":
            weights = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()}
            if self.rank == 0:
                save_file(weights, self.root / f"exported-{self.backend}.safetensors")
        return {"logprobs": logprobs, "steps": steps}

    def continued(self) -> Any:
        """One step, a checkpoint, and the next step with and without a restart."""
        path = self.root / f"checkpoint-{self.backend}"
        path.mkdir(exist_ok=True)
        engine = self.engine()
        engine.train_batch(own_share("one_rank_sees", 0, self.rank), sft)
        engine.save_checkpoint(path, step=1)
        collectives.barrier()
        other = self.engine(load_weights=False)
        other.load_checkpoint(path)
        share = own_share("one_rank_sees", 1, self.rank)
        both = [one.train_batch(share, sft) for one in (engine, other)]
        return [(update.loss, update.grad_norm) for update in both]

    def refused(self) -> str:
        """What every rank says when the second has a placeholder too many."""
        engine = self.engine()
        share = own_share("mixed", 0, self.rank)
        if self.rank == 1:
            share.input_ids_T[-1] = IMAGE
        try:
            engine.train_batch(share, sft)
        except EngineError as error:
            return str(error)
        return "nothing"


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--tier", required=True)
    args = parser.parse_args()
    join_group(args)
    plan = QUICK if args.tier == "quick" else SLOW
    results = {
        backend: {name: Rank(args.root, args.rank, backend).run(name) for name in names}
        for backend, names in plan.items()
    }
    path = args.root / f"results-{args.tier}-{args.rank}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
