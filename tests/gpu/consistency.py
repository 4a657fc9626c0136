"""Does one device compute what it must: the parts of an RL step, checked against each other.

A Qwen3 with random weights is served, sampled, scored, trained and served again by the worker of a
rank with the embedded engine. Each check is a number and its bound; an independent forward pass in
float32 by transformers is the reference of logprobs.

Run: python tests/gpu/consistency.py [--device auto] [--shape NAME]
Prints one line of JSON per check; the exit code is 1 if one fails.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from gpu_models import SHAPES, Shape, write_model

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch, TrainMetrics
from hardware.base import PlatformBase
from hardware.detection import detect

NUM_PROMPTS, GROUP_SIZE, NUM_UPDATES = 4, 4, 5
LENGTHS = {"qwen3-0.6b": (64, 64), "tiny": (16, 16)}
"""Tokens of prompts and of answers, by shape."""
MEAN_NATS = {"float32": 1e-4, "bfloat16": 0.03}
LARGEST_NATS = {"float32": 2e-3, "bfloat16": 0.6}
"""Difference of a logprob, by the dtype that is computed in."""
LR = 1e-4


@dataclass(frozen=True)
class Check:
    """One check; `bound` is the largest value that passes, or the smallest if `at_least`."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def passes(self) -> bool:
        """False for a value that is not a number."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "passes": self.passes})


def requests_of(shape: Shape, lengths: tuple[int, int]) -> list[RolloutRequest]:
    """Prompts of full length, with seeds."""
    draw = random.Random(0)
    return [
        RolloutRequest(
            f"prompt={at}",
            tuple(draw.randrange(4, shape.vocab_size) for _ in range(lengths[0])),
            SamplingParams(lengths[1]),
            tuple(draw.getrandbits(63) for _ in range(GROUP_SIZE)),
        )
        for at in range(NUM_PROMPTS)
    ]


def sequences_of(
    requests: Sequence[RolloutRequest], rows: Sequence[Sequence[Completion]]
) -> list[list[int]]:
    """Prompt and answer of each sample."""
    pairs = zip(requests, rows, strict=True)
    return [[*of.prompt_ids, *done.token_ids.tolist()] for of, row in pairs for done in row]


def batch_of(
    requests: Sequence[RolloutRequest], rows: Sequence[Sequence[Completion]]
) -> TokenBatch:
    """The samples; the loss is over the answers."""
    sequences, answers = sequences_of(requests, rows), [done for row in rows for done in row]
    num_prompt = [
        len(ids) - len(done.token_ids) for ids, done in zip(sequences, answers, strict=True)
    ]
    counted = [*zip(num_prompt, answers, strict=True)]
    return TokenBatch.from_sequences(
        sequences,
        loss_mask=[[0.0] * num + [1.0] * len(done.token_ids) for num, done in counted],
        rollout_logprobs=[[0.0] * num + done.logprobs.tolist() for num, done in counted],
    )


def reference_logprobs(
    hf_dir: Path, sequences: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """(T,) float32 by transformers, a sequence at a time; 0 for first tokens."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).to(device).eval()
    parts: list[Tensor] = []
    for sequence in sequences:
        ids = torch.tensor(sequence, device=device)
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        found = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([found.new_zeros(1), found]).cpu())
    return torch.cat(parts)


def share_repeated(
    rows: Sequence[Sequence[Completion]], again: Sequence[Sequence[Completion]]
) -> float:
    """Share of samples with equal tokens."""
    tokens = [[done.token_ids.tolist() for row in each for done in row] for each in (rows, again)]
    return sum(a == b for a, b in zip(*tokens, strict=True)) / len(tokens[0])


def differences(
    name: str, ours_T: Tensor, theirs_T: Tensor, mask_T: Tensor, dtype: str
) -> Iterator[Check]:
    """Mean and largest difference of logprobs over the answers."""
    found = (ours_T - theirs_T).abs()[mask_T > 0]
    yield Check(f"{name}, mean", float(found.mean()), MEAN_NATS[dtype])
    yield Check(f"{name}, largest", float(found.max()), LARGEST_NATS[dtype])


def new_worker(hf_dir: Path, platform: PlatformBase, dtype: str) -> ModelWorker:
    """Of one rank."""
    training = TrainingConfig.model_validate({"dtype": dtype})
    role = RoleSpec(
        ModelSource(hf_dir), training, OptimizerConfig(lr=LR), total_num_steps=NUM_UPDATES
    )
    rollout = RolloutConfig(max_num_sequences=NUM_PROMPTS * GROUP_SIZE, timeout_s=300.0)
    return ModelWorker(WorkerSpec({POLICY: role}, hf_dir, rollout, 1.0, platform.name, seed=0))


def checks(
    hf_dir: Path, shape: Shape, platform: PlatformBase, dtype: str, lengths: tuple[int, int]
) -> Iterator[Check]:
    """All of them, in the order of a step."""
    worker = new_worker(hf_dir, platform, dtype)
    requests = requests_of(shape, lengths)
    with closing(worker):
        worker.initialize()
        first = worker.sync_weights(0).sent.digest
        second = worker.sync_weights(1).sent.digest
        yield Check("equal weights have an equal digest", float(first == second), 1, at_least=True)
        rows = worker.generate(requests)
        again = worker.generate(requests)
        share = share_repeated(rows, again)
        yield Check("samples that repeat by their seeds", share, 1, at_least=True)
        batch = batch_of(requests, rows)
        mask_T, sampled_T = batch.columns["loss_mask"], batch.columns["rollout_logprobs"]
        reference_T = reference_logprobs(hf_dir, sequences_of(requests, rows), platform.device())
        trained_T = worker.infer_logprobs(batch)
        yield from differences(
            "trainer against transformers", trained_T, reference_T, mask_T, dtype
        )
        yield from differences(
            "sampler against transformers", sampled_T, reference_T, mask_T, dtype
        )
        losses: list[float] = []
        for _ in range(NUM_UPDATES):
            update = worker.train(batch, SupervisedLoss())
            assert isinstance(update, TrainMetrics), update
            losses.append(update.loss)
        yield Check("loss after five updates over the first", losses[-1] / losses[0], 0.995)
        third = worker.sync_weights(2).sent.digest
        yield Check("new weights have a new digest", float(third != second), 1, at_least=True)
        rows = worker.generate(requests)
        batch = batch_of(requests, rows)
        yield from differences(
            "sampler against trainer, after updates",
            batch.columns["rollout_logprobs"], worker.infer_logprobs(batch),
            batch.columns["loss_mask"], dtype,
        )  # fmt: skip


def main() -> int:
    """Print the checks; 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="platform: auto, nvidia, cpu, ...")
    parser.add_argument("--shape", choices=sorted(LENGTHS), help="by default that of the device")
    parser.add_argument("--dtype", choices=sorted(MEAN_NATS))
    chosen = parser.parse_args()
    platform, _ = detect(chosen.device)
    is_cpu = platform.device_name == "cpu"
    name = chosen.shape or ("tiny" if is_cpu else "qwen3-0.6b")
    dtype = chosen.dtype or ("float32" if is_cpu else "bfloat16")
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPES[name], platform.device())
        for check in checks(Path(directory), SHAPES[name], platform, dtype, LENGTHS[name]):
            print(check.line(), flush=True)
            failed |= not check.passes
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
