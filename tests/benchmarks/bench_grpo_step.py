"""One GRPO step: ours against TRL's GRPOTrainer, both on the CPU.

A step is: sample 8 prompts x 8 completions at temperature 1, score them, group-relative
advantages, one on-policy optimizer step without KL, and the new weights served. Same 0.85 M
parameter model in float32, same prompts (8 to 32 tokens), same limits, same threads. Two
workloads: equal lengths (60 tokens; the end token cannot be drawn) and uneven ones (the end token
is drawn with probability about 1/64 a token, limit 256: mean 68). The seconds of a step are
divided by the mean number of sampled tokens, since the two sides draw different samples.

Run: python tests/benchmarks/bench_grpo_step.py [--repeats N] [--threads N]
"""

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import Measurement, Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from tiny_model import NUM_SPECIAL, word, write_model

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.trainers.experience import Experience
from engines.trainers.packing import pack
from engines.trainers.scoring import ScoredSample
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.trajectory import Prompt, Trajectory
from engines.types import RolloutRequest, SamplingParams

VOCAB_SIZE, LR, STEPS_PER_TURN = 64, 1e-6, 3
NUM_PROMPTS, GROUP_SIZE = 8, 8


@dataclass(frozen=True)
class Workload:
    """How long completions get, and what ours must reach."""

    name: str
    max_new_tokens: int
    never_stops: bool
    goal: float


WORKLOADS = (
    Workload("uneven lengths", 256, False, 3.0),
    Workload("equal lengths", 60, True, 1.5),
)


def draw_prompts(num: int) -> list[tuple[int, ...]]:
    """Prompts as token ids."""
    draw = random.Random(1)
    return [
        tuple(draw.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(draw.randint(8, 32)))
        for _ in range(num)
    ]


class Ours:
    """The parts that an RL step is made of, as the RL trainer calls them."""

    def __init__(self, hf_dir: Path, workload: Workload) -> None:
        source = ModelSource(hf_dir)
        self._worker = ModelWorker(
            WorkerSpec(
                roles={
                    POLICY: RoleSpec(
                        source, TrainingConfig(), OptimizerConfig(lr=LR), total_num_steps=10_000
                    )
                },
                serving_dir=hf_dir,
                rollout=RolloutConfig(max_num_sequences=NUM_PROMPTS * GROUP_SIZE),
                temperature=1.0,
                platform="cpu",
                seed=0,
            )
        )
        self._worker.initialize()
        self._worker.sync_weights(0)
        self._workload = workload
        self._step = 0
        self._num_tokens = 0

    def close(self) -> None:
        self._worker.close()

    def turn(self, prompts: list[tuple[int, ...]]) -> tuple[float, float]:
        """Mean seconds of a step, and mean tokens of a sample."""
        self._num_tokens = 0
        start = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            self._one_step(prompts)
        seconds = (time.perf_counter() - start) / STEPS_PER_TURN
        return seconds, self._num_tokens / (STEPS_PER_TURN * NUM_PROMPTS * GROUP_SIZE)

    def _one_step(self, prompts: list[tuple[int, ...]]) -> None:
        self._step += 1
        first = (self._step * NUM_PROMPTS) % len(prompts)
        chosen = (prompts + prompts)[first : first + NUM_PROMPTS]
        seeds = random.Random(self._step)
        sampling = SamplingParams(self._workload.max_new_tokens)
        requests = [
            RolloutRequest(
                f"prompt={i}",
                ids,
                sampling,
                tuple(seeds.getrandbits(63) for _ in range(GROUP_SIZE)),
            )
            for i, ids in enumerate(chosen)
        ]
        groups = self._worker.generate(requests)
        prompts_asked = [Prompt.of(request) for request in requests]
        samples = tuple(
            ScoredSample(g, Trajectory.of(prompts_asked[g], completion), score, score)
            for g, group in enumerate(groups)
            for completion in group
            for score in [len(set(completion.token_ids)) / 64]
        )
        self._num_tokens += sum(sample.trajectory.num_sampled for sample in samples)
        index_B = torch.tensor([sample.group for sample in samples])
        algorithm = AlgorithmConfig()
        batch = pack([sample.trajectory for sample in samples])
        experience = Experience(samples, index_B, batch).with_advantages(algorithm)
        loss_fn = policy_loss_fn(algorithm, self._workload.max_new_tokens)
        self._worker.train(experience.batch, loss_fn)
        self._worker.sync_weights(self._step)


def compare(workload: Workload, python: Path, threads: int, repeats: int) -> Measurement:
    """Print seconds per step of both, and return TRL's over ours within each turn."""
    prompts = draw_prompts(64)
    with tempfile.TemporaryDirectory() as temporary:
        hf_dir = Path(temporary) / "model"
        num_parameters = write_model(
            hf_dir,
            vocab_size=VOCAB_SIZE,
            intermediate_size=416,
            max_length=512,
            never_stops=workload.never_stops,
        )
        ours = Ours(hf_dir, workload)
        trl_tokens: list[float] = []
        ours_tokens: list[float] = []
        with Peer(python, "trl_peer.py", threads, deadline_s=600) as trl:
            request = {"task": "grpo", "model": str(hf_dir), "lr": LR, "steps": STEPS_PER_TURN}
            request |= {"num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE}
            request |= {"max_new_tokens": workload.max_new_tokens}
            request |= {"prompts": [" ".join(map(word, ids)) for ids in prompts]}

            def ask_trl() -> float:
                answer = trl.ask(**request, seed=len(trl_tokens))
                trl_tokens.append(answer["mean_tokens"])
                return answer["seconds"] / answer["mean_tokens"] * 1e3

            def ask_ours() -> float:
                seconds, mean_tokens = ours.turn(prompts)
                ours_tokens.append(mean_tokens)
                return seconds / mean_tokens * 1e3

            got: dict[str, Measurement] = take_turns({"ours": ask_ours, "trl": ask_trl}, repeats)
        ours.close()
    print(
        f"GRPO step, {workload.name}, {num_parameters / 1e6:.2f} M parameters, {threads} thread(s)"
    )
    for name, tokens in (("ours", ours_tokens), ("trl", trl_tokens)):
        mean_tokens = sum(tokens) / len(tokens)
        print(f"  {name}: {got[name].text('ms per token of a sample')}, {mean_tokens:.1f} tokens")
    return turn_by_turn(got["trl"], got["ours"])


def main() -> None:
    """Print one ratio per workload."""
    options = arguments(__doc__ or "", peer=True)
    print(machine())
    for workload in WORKLOADS:
        ratio = compare(workload, options.peer_python, options.threads, options.repeats)
        print(ratio_line("TRL / ours", ratio, workload.goal))


if __name__ == "__main__":
    main()
