"""Two ranks of one thread each against one rank of two threads: what sharding costs.

The same optimizer steps of a model of about 3 M parameters through fsdp2 on gloo, on two cores;
1.0 would be free. Each side is one process group for all repeats, and they take turns.

Run: python tests/benchmarks/bench_ranks.py [--repeats N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from measure import arguments, ratio_line, take_turns, turn_by_turn
from tiny_model import write_model

from engines import collectives
from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform
from infra.host.ports import pick_ports

NUM_SEQUENCES, LENGTH, VOCAB_SIZE, NUM_STEPS = 32, 128, 2048, 3


def make_batch() -> TokenBatch:
    """Sequences of one length."""
    ids = torch.randint(2, VOCAB_SIZE, (NUM_SEQUENCES, LENGTH)).tolist()
    return TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * (LENGTH - 1)] * NUM_SEQUENCES)


class Ranks:
    """A set of processes that take steps when they are told to.

    Args:
        model: directory of the model.
        world_size: number of processes, each with 2 / world_size threads.
    """

    def __init__(self, model: Path, world_size: int) -> None:
        port = pick_ports(1)[0]
        argv = [sys.executable, __file__, f"--model={model}", f"--world-size={world_size}",
                f"--port={port}"]  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [*argv, f"--rank={rank}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(world_size)
        ]

    def step(self) -> float:
        """Seconds of the steps, of the slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(p.stdout.readline()) for p in self._processes if p.stdout]
        return max(answers)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()


def be_a_rank(args: argparse.Namespace) -> None:
    """Take steps on demand."""
    torch.manual_seed(0)
    torch.set_num_threads(2 // args.world_size)
    if args.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(seconds=120),
        )
    training = TrainingConfig(num_workers=args.world_size)
    engine: BaseEngine = create_engine(
        "language_model", Path(args.model), training, OptimizerConfig(), 1000, CPUPlatform(), seed=0
    )
    engine.initialize()
    batch = make_batch().select(range(args.rank, NUM_SEQUENCES, args.world_size))
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.train_batch(batch, SupervisedLoss())
        print(json.dumps(time.perf_counter() - start), flush=True)
    collectives.close_process_group()


def main() -> None:
    """Measure and print."""
    chosen = arguments(__doc__, peer=False)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        num = write_model(
            model, vocab_size=VOCAB_SIZE, intermediate_size=768, max_length=256, never_stops=True
        )
        sides = {"one rank": Ranks(model, 1), "two ranks": Ranks(model, 2)}
        try:
            taken = take_turns({n: side.step for n, side in sides.items()}, chosen.repeats)
        finally:
            for side in sides.values():
                side.close()
    print(f"  {num / 1e6:.1f} M parameters, {NUM_SEQUENCES} x {LENGTH} tokens per step")
    for what, measured in taken.items():
        print(f"  {what}: {measured.text('s')} for {NUM_STEPS} steps")
    gain = turn_by_turn(taken["one rank"], taken["two ranks"])
    print(ratio_line("two ranks against one", gain))


if __name__ == "__main__":
    if "--rank" in " ".join(sys.argv):
        parser = argparse.ArgumentParser()
        for option in ("model", "world-size", "rank", "port"):
            parser.add_argument(f"--{option}", type=int if option != "model" else str)
        be_a_rank(parser.parse_args())
    else:
        main()
