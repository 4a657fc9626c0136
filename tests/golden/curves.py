"""Three steps of SFT and of GRPO from one tiny model: the curves every backend must reproduce.

    python tests/golden/curves.py --write      compute curves.json anew, with fsdp2 on one rank

As a program with --rank it is one rank of another backend or layout. Float32; the weights come
from a seed, the samples of GRPO are fixed token sequences with fixed advantages.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from rlhf.testing.context import share
from rlhf.testing.launch import join_group, rank_arguments
from rlhf.testing.tiny_models import write_tiny_models

from engines import collectives
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.supervised import SupervisedLoss
from engines.config.algorithm import AlgorithmConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

GOLDEN = Path(__file__).with_name("curves.json")
NUM_STEPS = 3
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1)
GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.05, entropy_coeff=0.001, clip_ratio=0.05)
MAX_NEW_TOKENS = 12
Curves = dict[str, list[tuple[float, float]]]


def samples() -> TokenBatch:
    """Two prompts x four answers of 4 to 12 tokens; the mask is the answer."""
    generator = torch.Generator().manual_seed(11)
    ids, masks, advantages = [], [], []
    for _ in range(2):
        prompt = torch.randint(3, 19, (5,), generator=generator).tolist()
        scores = torch.tensor([0.0, 1.0, 1.0, 0.0]) + torch.rand(4, generator=generator)
        standard = (scores - scores.mean()) / scores.std()
        for advantage in standard.tolist():
            length = int(torch.randint(4, MAX_NEW_TOKENS + 1, (), generator=generator))
            answer = torch.randint(3, 30, (length,), generator=generator).tolist()
            ids.append(prompt + answer)
            masks.append([0.0] * 5 + [1.0] * length)
            advantages.append([advantage] * (5 + length))
    return TokenBatch.from_sequences(ids, loss_mask=masks, advantages=advantages)


def curves(models: Path, backend: str, **training: object) -> Curves:
    """(loss, gradient norm) of each step, by algorithm.

    Args:
        models: directory of the tiny models.
        backend: of training.
        **training: further settings.

    Returns:
        `sft` and `grpo`.
    """

    def engine() -> BaseEngine:
        config = TrainingConfig.model_validate(
            {"backend": backend, "collective_timeout_s": 60.0, **training}
        )
        made = create_engine(
            "language_model", models / "qwen3", config, OPTIMIZER, 10, CPUPlatform(), seed=0
        )
        made.initialize()
        return made

    batch = samples()
    sft = engine()
    results: Curves = {"sft": [], "grpo": []}
    for _ in range(NUM_STEPS):
        update = sft.train_batch(share(sft, batch), SupervisedLoss())
        results["sft"].append((update.loss, update.grad_norm))
    policy = engine()
    old_logprobs_T = policy.infer_batch(batch).logprobs_T
    batch = batch.with_columns(old_logprobs=old_logprobs_T, ref_logprobs=old_logprobs_T)
    loss_fn = policy_loss_fn(GRPO, MAX_NEW_TOKENS)
    for _ in range(NUM_STEPS):
        update = policy.train_batch(share(policy, batch), loss_fn)
        results["grpo"].append((update.loss, update.grad_norm))
    return results


def write() -> None:
    """Compute the golden file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_models(Path(directory))
        found = curves(Path(directory), "fsdp2")
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the golden file, or be one rank."""
    if sys.argv[1:] == ["--write"]:
        write()
        return
    parser = rank_arguments()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--training", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    found = curves(args.models, args.backend, num_workers=2, **args.training)
    (args.out / f"{args.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
