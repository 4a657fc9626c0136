"""One rank of a layout: gradients of the losses over pairs, of a reward model, and of a teacher.

As `loss_gradients`, of which the optimizer is, cut into 1 and into 7 micro-batches. Pairs are units
of two sequences that lie apart; those of a step are dealt to the ranks one by one.
"""

import json
from pathlib import Path

import torch
from loss_gradients import NUM_MICRO_BATCHES, OPTIMIZER, SCALE, Counted
from plain_pairs import KTO, LENGTH, PAIR_LOSSES, REWARD, SIZES
from rlhf.testing.launch import join_group, rank_arguments
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines import collectives
from engines.algorithms.distillation import TopKDistillation
from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.pair_objective import PairObjective, RewardModelObjective
from engines.config.training import TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.training.spec import LossFn, ModelType
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

REPEATS = 4
"""Of `SIZES`: on four ranks, too, each has a pair for every micro-batch."""
NUM_PAIRS = REPEATS * len(SIZES)
SCORES = "reward_model"
POLICY_LOSSES: dict[str, LossFn] = {
    **{name: PairObjective(loss, options) for name, (loss, options, _) in PAIR_LOSSES.items()},
    "kto": KtoObjective(KTO),
    "topk": TopKDistillation(),
}
COLUMNS = ("loss_mask", "ref_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
ROWS = ("chosen", "margin", "mismatch_log_ratio")


def store(batch: TokenBatch, path: Path) -> None:
    """Write a step for the ranks."""
    assert batch.unit_B is not None
    tensors = {"ids": batch.input_ids_T, "bounds": batch.cu_seqlens, "unit": batch.unit_B}
    tensors |= {name: batch.columns[name] for name in COLUMNS}
    tensors |= {name: batch.rows[name] for name in ROWS}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def stored(path: Path) -> TokenBatch:
    """The step again."""
    found = load_file(path)
    return TokenBatch(
        found["ids"],
        found["bounds"],
        {name: found[name] for name in COLUMNS},
        rows={name: found[name] for name in ROWS},
        unit_B=found["unit"],
    )


def share_of(batch: TokenBatch, rank: int, size: int) -> TokenBatch:
    """Every `size`-th pair."""
    assert batch.unit_B is not None
    own = batch.unit_B.unique()[rank::size]
    return batch.select(torch.isin(batch.unit_B, own).nonzero().flatten().tolist())


def gradients(
    engine: BaseEngine, loss: LossFn, share: TokenBatch, num_micro: int
) -> dict[str, Tensor]:
    """By weight; the engine's weights are spoilt."""
    before = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()}
    counted = Counted(loss)
    engine.train_batch(share, counted)
    assert counted.num_calls in (num_micro, 0)  # only a pipeline's last stage sees outputs
    return {
        key: ((before[key].double() - tensor.double()) / SCALE).contiguous()
        for key, tensor in engine.get_per_tensor_param()
    }


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    for name in ("policy", "reward", "batch", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--training", type=json.loads, required=True)
    parser.add_argument("--data-parallel-size", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    join_group(args)
    batch, found = stored(args.batch), dict[str, Tensor]()
    kinds: dict[ModelType, tuple[Path, dict[str, LossFn]]] = {
        "language_model": (args.policy, POLICY_LOSSES),
        "value_model": (args.reward, {SCORES: RewardModelObjective(REWARD)}),
    }
    for num_micro in NUM_MICRO_BATCHES:
        pairs = NUM_PAIRS // args.data_parallel_size // num_micro
        config = TrainingConfig(
            backend=args.backend,
            num_workers=args.world_size,
            collective_timeout_s=60.0,
            max_tokens_per_micro_batch=pairs * LENGTH // args.training.get("ulysses_size", 1),
            **args.training,
        )
        for kind, (model, losses) in kinds.items():
            engine = create_engine(kind, model, config, OPTIMIZER, 10, CPUPlatform(), 0)
            engine.initialize()
            assert engine.data_parallel_size == args.data_parallel_size
            share = share_of(batch, engine.data_parallel_rank, engine.data_parallel_size)
            start = args.out.parent / f"start-{kind}-{num_micro}"
            start.mkdir(exist_ok=True)
            engine.save_checkpoint(start, 0)
            for name, loss in losses.items():
                engine.load_checkpoint(start)
                for key, tensor in gradients(engine, loss, share, num_micro).items():
                    found[f"{name}/{num_micro}/{key}"] = tensor
    if args.rank == 0:
        save_file(found, args.out)
    collectives.close_process_group()


if __name__ == "__main__":
    main()
