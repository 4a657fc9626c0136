"""What the driver does between the last answer of a step and the first micro-batch on a rank.

A stand-in engine answers with random tokens of full length, evenly over the time of a generation;
everything behind it is what a round has: decoding, the reward `math` in its processes, packing,
advantages, mini-batches, and two ranks in processes of their own, which note when their first
mini-batch is there and compute nothing. Beside the seconds it prints what an answer costs on the
wire and what the driver holds while the ranks train, both in bytes a token. Nothing of it has a
peer; the goals stand below.

Run: python tests/benchmarks/bench_driver_step.py [--repeats N] [--prompts 64] [--samples 16]
         [--tokens 8192] [--generation-s 20]
"""

import argparse
import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from measure import Measurement, cost_line, machine

from engines.config.algorithm import RewardConfig
from engines.config.model import TokenizerConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.placement import reserve
from engines.controller.ray_group import RayGroupOptions, RayWorkerGroup
from engines.controller.worker_group import Dispatch, dispatch
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.examples import rl_prompts
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.rewards.scorer import RewardScorer
from engines.trainers.experience import Collector
from engines.trainers.progress import LoopStep
from engines.trainers.prompts import PromptSource
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import CompletionScorer
from engines.training.spec import POLICY, LossFn, RoleName
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch, TrainMetrics

MAX_WIRE_BYTES, MAX_DRIVER_S, MAX_RESIDENT_BYTES = 9.0, 1.5, 12.0
NUM_RANKS = 2
CHARACTERS = "0123456789+=. "
NUM_TOKENS = 4 + len(CHARACTERS)
"""Of the tokenizer: special ones, then a token for each character."""


class NotingWorker:
    """A rank that notes when its first mini-batch is there, and computes nothing."""

    data_parallel_rank = 0

    def __init__(self) -> None:
        self._arrived_s = 0.0

    def initialize(self) -> None:
        """Take the place among the data-parallel ranks."""
        self.data_parallel_rank = torch.distributed.get_rank()

    @dispatch(Dispatch.SPLIT)
    def train(
        self,
        batch: TokenBatch,  # noqa: ARG002
        loss_fn: LossFn,  # noqa: ARG002
        role: RoleName = POLICY,  # noqa: ARG002
    ) -> TrainMetrics:
        """Note the time of the first."""
        self._arrived_s = self._arrived_s or time.time()
        found = {"mismatch/logprob_abs_mean": 0.0, "mismatch/logprob_abs_max": 0.0}
        return TrainMetrics(loss=0.0, grad_norm=0.0, lr=0.0, num_tokens=0, metrics=found)

    @dispatch(Dispatch.RANK_ZERO)
    def arrived_s(self) -> float:
        """When it was there, since the epoch; forgotten with this."""
        arrived_s, self._arrived_s = self._arrived_s, 0.0
        return arrived_s

    def close(self) -> None:
        """Nothing is held."""


class StandInRollout:
    """Answers with random tokens, evenly over the time of a generation.

    Args:
        vocab_size: of the tokens.
        generation_s: between the request and the last answer.
    """

    num_restarts = 0

    def __init__(self, vocab_size: int, generation_s: float) -> None:
        self._vocab_size, self._generation_s = vocab_size, generation_s
        self.ended_s = 0.0

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[list[Completion]]:
        """See `Rollout`."""
        draw = np.random.default_rng(0)
        num_samples = sum(request.num_samples for request in requests)
        pause_s = self._generation_s / num_samples
        rows: list[list[Completion]] = []
        for request in requests:
            rows.append([])
            for sample in range(request.num_samples):
                due_s = time.monotonic() + pause_s
                length = request.sampling.max_new_tokens
                ids = draw.integers(4, self._vocab_size, length, dtype=np.int32)
                logprobs = draw.random(length, dtype=np.float32) - 1
                versions = np.zeros(length, np.int64)
                answer = Completion(request.request_id, sample, ids, logprobs, versions, "length")
                rows[-1].append(answer)
                if on_completion is not None:
                    on_completion(answer)
                time.sleep(max(0.0, due_s - time.monotonic()))
        self.ended_s = time.time()
        return rows

    def sleep(self) -> None:
        """There is no device."""


class Quiet:
    """What a round asks of its progress while it trains."""

    def say(self, line: str) -> None:
        """A poisoned update would change what is measured."""
        raise AssertionError(line)


class DriverStep:
    """A round of such steps.

    Args:
        options: of the command.
        directory: for logs and the tokenizer.
        workers: the ranks.
        rewards: the reward function.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        directory: Path,
        workers: RayWorkerGroup,
        rewards: RewardScorer,
    ) -> None:
        config = round_config(options)
        tokenizer = DirectoryTokenizer.load(
            train_tokenizer(
                TokenizerConfig(), [CHARACTERS], directory / "tokenizer", max_length=65536
            )
        )
        rows = [
            RLRow("s", (Message("user", f"{i}+{i}="),), "", RewardModel("rule", str(2 * i)))
            for i in range(options.prompts)
        ]
        self._rollout = StandInRollout(NUM_TOKENS, options.generation_s)
        prompts = PromptSource(rl_prompts(rows, tokenizer), config, 0)
        scorer = CompletionScorer(rewards, tokenizer)
        self._trainer = RLTrainer(
            config,
            workers,
            cast(Any, self._rollout),
            prompts,
            scorer,
            cast(Any, Quiet()),
            [4, 5],
            NUM_TOKENS,
        )
        self._workers, self._number = workers, 0

    def turn(self) -> tuple[float, float]:
        """Seconds between the last answer and the first mini-batch; resident bytes a token."""
        gc.collect()
        before = resident_bytes()
        self._number += 1
        trainer, step = self._trainer, LoopStep(self._number, self._number)
        collected: Collector = trainer.generate(step, 0)
        batch = trainer.infer(step, collected.experience())
        batch = trainer.estimate_advantages(step, batch, trainer.start.kl_coef)
        trainer.update(step, batch, trainer.start)
        arrived_s = self._workers.run(NotingWorker.arrived_s)
        gc.collect()
        held = (resident_bytes() - before) / batch.batch.num_tokens
        phases = ", ".join(
            f"{name} {seconds:.2f} s" for name, seconds in step.clock.seconds.items()
        )
        print(f"  {batch.batch.num_tokens / 1e6:.1f} M tokens: {phases}", flush=True)
        return arrived_s - self._rollout.ended_s, held


def resident_bytes() -> int:
    """Memory that this process alone holds; what Ray's object store shares is not in it."""
    return psutil.Process(os.getpid()).memory_full_info().uss


def wire_bytes(options: argparse.Namespace) -> float:
    """Of an answer, a token."""
    answer = StandInRollout(4096, 0.0).generate([_request(options.tokens)])[0][0]
    return len(pickle.dumps(answer, protocol=5)) / options.tokens


def _request(num_tokens: int) -> RolloutRequest:
    return RolloutRequest("round=1/step=1/prompt=0", (4, 5), SamplingParams(num_tokens), (1,))


def round_config(options: argparse.Namespace) -> RLRoundStageConfig:
    """A round of GRPO with one update a step."""
    return RLRoundStageConfig.model_validate(
        {
            "round": 1,
            "model": {"init": "random", "max_length": 65536},
            "training": {"max_tokens_per_micro_batch": 65536},
            "rollout": {},
            "rl": {
                "num_steps_per_round": 1000,
                "batch_size_prompts": options.prompts,
                "group_size": options.samples,
                "sampling": {"max_new_tokens": options.tokens},
                "optimizer": {"lr": 1e-6},
                "mismatch": {"enable": False},
            },
            "checkpoint": {},
        }
    )


def main() -> None:
    """Print seconds and bytes, each against its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--generation-s", type=float, default=20.0)
    options = parser.parse_args()
    import ray  # here, since tests are collected without it

    torch.set_num_threads(1)
    print(f"The driver's part of a step\n  {machine()}")
    print(f"  wire: {wire_bytes(options):.2f} bytes a token; goal at most {MAX_WIRE_BYTES:g}")
    ray.init(num_cpus=NUM_RANKS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        group_options = RayGroupOptions(NUM_RANKS, "gloo", 1, directory / "logs")
        pool = reserve([{"num_cpus": 1}] * NUM_RANKS)
        workers = RayWorkerGroup(NotingWorker, group_options, pool)
        try:
            with RewardScorer(RewardConfig.model_validate({"function": "math"})) as rewards:
                step = DriverStep(options, directory, workers, rewards)
                step.turn()
                turns = [step.turn() for _ in range(options.repeats)]
        finally:
            workers.close()
            ray.shutdown()
    seconds, held = (Measurement(tuple(column)) for column in zip(*turns, strict=True))
    print(cost_line("seconds between the last answer and a rank's work", seconds, MAX_DRIVER_S))
    print(cost_line("resident bytes a token", held, MAX_RESIDENT_BYTES))


if __name__ == "__main__":
    main()
