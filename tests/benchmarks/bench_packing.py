"""Packed against padded training steps, on mixes of lengths with a long tail.

Both train the same 0.85 M parameter model in float32 with AdamW on the same 64 sequences per step.
Padded: plain transformers on the CPU's own attention, 8 sequences a pass in the order they come,
each pass padded to its longest. Packed: our training engine, 8,192 tokens a pass, no padding.
The padding share predicts the ratio: tokens of the padded rows over tokens of the sequences. The
quotient is the measured ratio over the predicted one; attention, which grows with the square of
the padded length, can lift it above 1. The ratio by CPU time beside it is what a busy machine
cannot distort.

Run: python tests/benchmarks/bench_packing.py [--repeats N] [--threads N]
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Measurement, arguments, machine, ratio_line, take_turns, turn_by_turn
from tiny_model import NUM_SPECIAL, PAD_TOKEN_ID, write_model
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

VOCAB_SIZE, MIN_TOKENS, MAX_TOKENS, LR = 512, 16, 1024, 1e-4
SEQUENCES_PER_STEP, SEQUENCES_PER_PASS, TOKENS_PER_PASS = 64, 8, 8192
GOAL = 0.95
IGNORED = -100

Sequences = list[list[int]]


def log_normal(draw: random.Random) -> int:
    """Answers of about 90 tokens, one in 16 above 400."""
    return int(draw.lognormvariate(4.5, 1.0))


def short_and_long(draw: random.Random) -> int:
    """Nine in ten below 64 tokens, one in ten up to the limit."""
    return draw.randint(16, 64) if draw.random() < 0.9 else draw.randint(512, MAX_TOKENS)


MIXES: dict[str, Callable[[random.Random], int]] = {
    "log-normal": log_normal,
    "short and long": short_and_long,
}


def draw_step(length_of: Callable[[random.Random], int]) -> Sequences:
    """The sequences of one optimizer step."""
    draw = random.Random(0)
    lengths = [min(MAX_TOKENS, max(MIN_TOKENS, length_of(draw))) for _ in range(SEQUENCES_PER_STEP)]
    return [[draw.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def passes(step: Sequences) -> list[Sequences]:
    """The sequences that the padded loop takes at once."""
    starts = range(0, len(step), SEQUENCES_PER_PASS)
    return [step[i : i + SEQUENCES_PER_PASS] for i in starts]


def predicted_ratio(step: Sequences) -> float:
    """Tokens with padding over tokens without."""
    padded = sum(len(rows) * max(map(len, rows)) for rows in passes(step))
    return padded / sum(map(len, step))


class Packed:
    """The engine of the SFT stage."""

    def __init__(self, hf_dir: Path) -> None:
        training = TrainingConfig(max_tokens_per_micro_batch=TOKENS_PER_PASS)
        self._engine = create_engine(
            "language_model", hf_dir, training, OptimizerConfig(lr=LR), 10_000, CPUPlatform(), 0
        )
        self._engine.initialize()

    def step(self, step: Sequences) -> float:
        """One optimizer step; returns its loss."""
        mask = [[0.0] + [1.0] * (len(ids) - 1) for ids in step]
        batch = TokenBatch.from_sequences(step, loss_mask=mask)
        return self._engine.train_batch(batch, SupervisedLoss()).loss


class Padded:
    """Plain transformers: rows of equal length, an attention mask, no loss on the padding."""

    def __init__(self, hf_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, weight_decay=0.01, fused=True
        )

    def step(self, step: Sequences) -> float:
        """One optimizer step; returns its loss."""
        num_targets = sum(len(ids) - 1 for ids in step)
        total = 0.0
        for rows in passes(step):
            sequences = [torch.tensor(ids) for ids in rows]
            ids_RL = pad_sequence(sequences, batch_first=True, padding_value=PAD_TOKEN_ID)
            mask_RL = (ids_RL != PAD_TOKEN_ID).long()
            logits = self._model(ids_RL, attention_mask=mask_RL, use_cache=False).logits[:, :-1]
            targets = ids_RL.masked_fill(mask_RL == 0, IGNORED)[:, 1:]
            loss = cross_entropy(
                logits.reshape(-1, VOCAB_SIZE), targets.reshape(-1), ignore_index=IGNORED,
                reduction="sum",
            ) / num_targets  # fmt: skip
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def compare(name: str, step: Sequences, hf_dir: Path, repeats: int) -> None:
    """Measure both on one mix of lengths and print the ratios."""
    contenders = {"packed": Packed(hf_dir), "padded": Padded(hf_dir)}
    losses = {who: contender.step(step) for who, contender in contenders.items()}
    if abs(losses["packed"] - losses["padded"]) > 1e-4:
        raise SystemExit(f"the two do not train on the same loss: {losses}")
    num_tokens = sum(map(len, step))
    cpu_s: dict[str, list[float]] = {who: [] for who in contenders}

    def tokens_per_s(who: str) -> float:
        start, cpu_start = time.perf_counter(), time.process_time()
        contenders[who].step(step)
        cpu_s[who].append(time.process_time() - cpu_start)
        return num_tokens / (time.perf_counter() - start)

    got = take_turns({who: lambda who=who: tokens_per_s(who) for who in contenders}, repeats)
    predicted = predicted_ratio(step)
    ratio = turn_by_turn(got["packed"], got["padded"])
    by_cpu = turn_by_turn(*(Measurement(tuple(cpu_s[who][1:])) for who in ("padded", "packed")))
    print(f" {name}: {num_tokens} tokens, {1 - 1 / predicted:.0%} of the padded rows is padding")
    for who, measured in got.items():
        print(f"  {who}: {measured.text('tokens/s, padding not counted')}")
    print(ratio_line("packed / padded", ratio))
    print(f"  predicted by the padding share: {predicted:.2f}")
    print(ratio_line("measured / predicted", _over(ratio, predicted), GOAL))
    print(ratio_line("measured by CPU time / predicted", _over(by_cpu, predicted)))


def _over(measured: Measurement, number: float) -> Measurement:
    return Measurement(tuple(value / number for value in measured.values))


def main() -> None:
    """Print tokens per second, both ratios and their quotient for each mix."""
    options = arguments(__doc__ or "", peer=False)
    with tempfile.TemporaryDirectory() as temporary:
        hf_dir = Path(temporary) / "model"
        num_parameters = write_model(
            hf_dir,
            vocab_size=VOCAB_SIZE,
            intermediate_size=384,
            max_length=MAX_TOKENS,
            never_stops=False,
        )
        print(f"packing, {num_parameters / 1e6:.2f} M parameters, {options.threads} thread(s)")
        print(f"  {machine()}")
        for name, length_of in MIXES.items():
            compare(name, draw_step(length_of), hf_dir, options.repeats)


if __name__ == "__main__":
    main()
