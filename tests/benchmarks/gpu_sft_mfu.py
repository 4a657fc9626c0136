"""SFT on one GPU: tokens per second and MFU of our engine against a hand-tuned PyTorch loop.

The model has the shape of Qwen3-0.6B and random weights; a step trains on 16,384 tokens in full
sequences of 2,048, in one pass, in bfloat16 with float32 master weights and fused AdamW. The
loop is what one would write by hand for exactly this: a dense batch without padding, bfloat16
weights copied from the masters once per step, flash attention through SDPA, fused cross entropy.
Both prepare their batch inside the step and take turns, so that clocks and heat hit them alike.

MFU = model FLOPs / time / peak: 6 per weight that multiplies and token (the tied embedding
counts once, as the output layer) plus 6 * tokens seen on average * heads * head_dim * 2 per layer
and token for causal attention; recomputation is not counted.

Run: python tests/benchmarks/gpu_sft_mfu.py [--repeats N] [--peak-tflops 989] [--compile] [--liger]
A trial without a GPU: add --device cpu --shape tiny --peak-tflops 0.1
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_models import SHAPES, Shape, write_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from engines.algorithms.supervised import SupervisedLoss
from engines.collectives import close_process_group
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.transformers.build import enable_activation_checkpointing
from engines.training.base import create_engine
from engines.types import TokenBatch
from hardware.base import PlatformBase
from hardware.detection import detect

LR, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-5, 0.01, 1.0
STEPS_PER_TURN = 4
GOAL_MFU = 0.4
PUBLISHED_TOKENS_PER_S, PUBLISHED_MFU = 11_900, 0.111
"""prime-rl's figures of 2026-02-01 for one H100: Qwen3-0.6B, reinforcement learning of all weights,
16 k tokens."""
WARMUP_TURNS = 1


def draw_steps(shape: Shape) -> list[list[list[int]]]:
    """Token ids of each step of a turn."""
    generator = torch.Generator().manual_seed(0)
    size = (STEPS_PER_TURN, shape.num_sequences, shape.sequence_length)
    return torch.randint(0, shape.vocab_size, size, generator=generator).tolist()


class Ours:
    """The engine of the SFT stage, fed as its trainer feeds it."""

    def __init__(
        self, hf_dir: Path, shape: Shape, platform: PlatformBase, faster: dict[str, bool],
        *, checkpointing: bool,
    ) -> None:  # fmt: skip
        training = TrainingConfig(
            dtype="bfloat16",
            max_tokens_per_micro_batch=shape.sequence_length * shape.num_sequences,
            gradient_checkpointing=checkpointing,
            **faster,
        )
        optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
        self._engine = create_engine(
            "language_model", hf_dir, training, optimizer, 10_000, platform, seed=0
        )
        self._engine.initialize()

    def step(self, sequences: list[list[int]]) -> float:
        mask = [[0.0] + [1.0] * (len(ids) - 1) for ids in sequences]
        batch = TokenBatch.from_sequences(sequences, loss_mask=mask)
        return self._engine.train_batch(batch, SupervisedLoss()).loss


class PlainLoop:
    """Model, cross entropy, clip, AdamW: nothing else."""

    def __init__(
        self, hf_dir: Path, shape: Shape, platform: PlatformBase, *, checkpointing: bool
    ) -> None:
        self._device, self._vocab_size = platform.device(), shape.vocab_size
        model = AutoModelForCausalLM.from_pretrained(
            hf_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._model = model.to(self._device).train()
        self._weights = list(self._model.parameters())
        self._masters = [p.detach().float() for p in self._weights]
        if checkpointing:
            enable_activation_checkpointing(self._model)
        matrices = [p for p in self._masters if p.dim() > 1]
        vectors = [p for p in self._masters if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=LR, weight_decay=WEIGHT_DECAY, fused=True,
        )  # fmt: skip

    def step(self, sequences: list[list[int]]) -> float:
        ids = torch.tensor(sequences).to(self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, self._vocab_size), ids[:, 1:].reshape(-1)
        )
        del logits
        loss.backward()
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([w.data for w in self._weights], self._masters)
        return float(loss.detach())


def turn(
    step: Callable[[list[list[int]]], float], steps: list[list[list[int]]], platform: PlatformBase
) -> float:
    """Seconds of one turn."""
    platform.synchronize()
    start = time.perf_counter()
    for sequences in steps:
        step(sequences)
    platform.synchronize()
    return time.perf_counter() - start


def compare(
    hf_dir: Path, shape: Shape, platform: PlatformBase, repeats: int, peak_flops: float,
    faster: dict[str, bool], *, checkpointing: bool,
) -> float:  # fmt: skip
    """Measure both, print a line for each; returns ours over the plain loop."""
    steps = draw_steps(shape)
    num_tokens = STEPS_PER_TURN * shape.sequence_length * shape.num_sequences
    contenders = {
        "ours": Ours(hf_dir, shape, platform, faster, checkpointing=checkpointing),
        "plain loop": PlainLoop(hf_dir, shape, platform, checkpointing=checkpointing),
    }
    losses = {name: contender.step(steps[0]) for name, contender in contenders.items()}
    if abs(losses["ours"] - losses["plain loop"]) > 0.05:
        raise SystemExit(f"the two do not train on the same loss: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(-WARMUP_TURNS, repeats):
        for name, contender in contenders.items():
            taken = turn(contender.step, steps, platform)
            if repeat >= 0:
                seconds[name].append(taken)
    print(f"gradient checkpointing {'on' if checkpointing else 'off'}")
    speed = {name: num_tokens / statistics.median(values) for name, values in seconds.items()}
    for name, tokens_per_s in speed.items():
        values = seconds[name]
        spread = (max(values) - min(values)) / statistics.median(values)
        mfu = tokens_per_s * shape.flops_per_token() / peak_flops
        print(f"  {name}: {tokens_per_s:,.0f} tokens/s, MFU {mfu:.1%} (spread {spread:.0%})")
    ratio = speed["ours"] / speed["plain loop"]
    ours_mfu = speed["ours"] * shape.flops_per_token() / peak_flops
    print(f"  ours / goal of {GOAL_MFU:.0%} MFU: {ours_mfu / GOAL_MFU:.2f}")
    print(
        f"  ours / published for one H100 (prime-rl): {speed['ours'] / PUBLISHED_TOKENS_PER_S:.2f} "
        f"of {PUBLISHED_TOKENS_PER_S:,} tokens/s, {ours_mfu / PUBLISHED_MFU:.2f} of "
        f"{PUBLISHED_MFU:.1%} MFU"
    )
    print(f"  ours / plain loop: {ratio:.2f}")
    print(
        f"  largest allocation, both resident: {platform.max_memory_allocated_bytes() / 1e9:.1f} GB"
    )
    return ratio


def main() -> None:
    """Print tokens per second, MFU and the ratio, with checkpointing off and on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="nvidia", help="platform: nvidia or cpu")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="dense bfloat16; 989 is an H100 or H200"
    )
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile")
    parser.add_argument("--liger", action="store_true", help="ours with Liger's kernels")
    options = parser.parse_args()
    faster = {"use_torch_compile": options.compile, "use_liger": options.liger}
    logging.disable_progress_bar()
    platform, reason = detect(options.device)
    shape = SHAPES[options.shape]
    print(
        f"{options.shape}, {shape.sequence_length * shape.num_sequences} tokens per step; {reason}"
    )
    print(f"torch {torch.__version__}; peak {options.peak_tflops:g} TFLOP/s")
    with tempfile.TemporaryDirectory() as temporary:
        hf_dir = Path(temporary)
        write_model(hf_dir, shape, torch.device("cpu"))
        for checkpointing in (False, True):
            compare(
                hf_dir, shape, platform, options.repeats, options.peak_tflops * 1e12,
                faster, checkpointing=checkpointing,
            )  # fmt: skip
            platform.empty_cache()
    close_process_group()


if __name__ == "__main__":
    main()
