"""SFT speed: our training engine against a bare PyTorch loop and against TRL with packing.

All train the same 0.85 M parameter model in float32 with AdamW on the same sequences of uneven
length (16 to 256 tokens), every token in the loss, about 8,192 tokens per optimizer step, no
gradient checkpointing. The bare loop is the strongest one could write: the sequences laid end to
end and cut into full rows of 256, so it wastes nothing on padding, but lets neighbours see each
other. TRL packs in three ways: as it does by default (best fit, 8 rows a pass, sequences kept
apart), best fit with 1 row a pass (its fastest setting that keeps them apart), and `wrapped`
(cuts sequences anywhere and lets neighbours see each other, like the bare loop). Ours keeps
sequences apart. Preparing a batch is part of a step; starting up is not.

Run: python tests/benchmarks/bench_sft.py [--repeats N] [--threads N]
"""

import json
import random
import tempfile
import time
from pathlib import Path

import torch
from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from tiny_model import NUM_SPECIAL, write_model
from transformers import AutoModelForCausalLM

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import create_engine
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

VOCAB_SIZE, ROW_TOKENS, STEP_TOKENS, LR = 512, 256, 8192, 1e-4
STEPS_PER_TURN = 4


def draw_steps(num_steps: int, vocab_size: int = VOCAB_SIZE) -> list[list[list[int]]]:
    """Sequences of each optimizer step, about `STEP_TOKENS` tokens together."""
    draw = random.Random(0)
    steps = []
    for _ in range(num_steps):
        step: list[list[int]] = []
        while sum(map(len, step)) < STEP_TOKENS - ROW_TOKENS // 2:
            length = draw.randint(16, ROW_TOKENS)
            step.append([draw.randrange(NUM_SPECIAL, vocab_size) for _ in range(length)])
        steps.append(step)
    return steps


class SFT:
    """The engine of the SFT stage, fed as its trainer feeds it."""

    def __init__(self, hf_dir: Path, micro_batch_tokens: int = 2 * STEP_TOKENS) -> None:
        training = TrainingConfig(max_tokens_per_micro_batch=micro_batch_tokens)
        self._engine = create_engine(
            "language_model", hf_dir, training, OptimizerConfig(lr=LR), 10_000, CPUPlatform(), 0
        )
        self._engine.initialize()

    def turn(self, steps: list[list[list[int]]]) -> float:
        start, num_tokens = time.perf_counter(), 0
        for sequences in steps:
            mask = [[0.0] + [1.0] * (len(ids) - 1) for ids in sequences]
            batch = TokenBatch.from_sequences(sequences, loss_mask=mask)
            num_tokens += self._engine.train_batch(batch, SupervisedLoss()).num_tokens
        return num_tokens / (time.perf_counter() - start)


class BareLoop:
    """Model, cross entropy, clip, AdamW: nothing else."""

    def __init__(self, hf_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.01)

    def turn(self, steps: list[list[list[int]]]) -> float:
        start, num_tokens = time.perf_counter(), 0
        for sequences in steps:
            flat = [token for ids in sequences for token in ids]
            num_rows = len(flat) // ROW_TOKENS
            ids_RT = torch.tensor(flat[: num_rows * ROW_TOKENS]).view(num_rows, ROW_TOKENS)
            logits = self._model(ids_RT, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, VOCAB_SIZE), ids_RT[:, 1:].reshape(-1)
            )
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            num_tokens += ids_RT.numel()
        return num_tokens / (time.perf_counter() - start)


def main() -> None:
    """Print tokens per second and both ratios."""
    options = arguments(__doc__ or "", peer=True)
    with tempfile.TemporaryDirectory() as temporary:
        hf_dir, rows = Path(temporary) / "model", Path(temporary) / "rows.json"
        num_parameters = write_model(
            hf_dir,
            vocab_size=VOCAB_SIZE,
            intermediate_size=384,
            max_length=ROW_TOKENS,
            never_stops=False,
        )
        steps = draw_steps(STEPS_PER_TURN)
        rows.write_text(
            json.dumps([ids for step in draw_steps(STEPS_PER_TURN + 3) for ids in step])
        )
        ours, bare = SFT(hf_dir), BareLoop(hf_dir)
        with Peer(options.peer_python, "trl_peer.py", options.threads, deadline_s=600) as trl:
            request = {"task": "sft", "model": str(hf_dir), "rows": str(rows), "lr": LR}
            request |= {"row_tokens": ROW_TOKENS, "rows_per_step": STEP_TOKENS // ROW_TOKENS}
            request |= {"steps": STEPS_PER_TURN, "seed": 0}

            def ask_trl(strategy: str, rows_per_pass: int) -> float:
                answer = trl.ask(**request, strategy=strategy, rows_per_pass=rows_per_pass)
                return answer["tokens_per_s"]

            got = take_turns(
                {
                    "ours": lambda: ours.turn(steps),
                    "bare loop": lambda: bare.turn(steps),
                    "TRL packed": lambda: ask_trl("bfd", 8),
                    "TRL packed, 1 row a pass": lambda: ask_trl("bfd", 1),
                    "TRL wrapped": lambda: ask_trl("wrapped", 32),
                },
                options.repeats,
            )
    print(f"SFT, {num_parameters / 1e6:.2f} M parameters, {options.threads} thread(s)")
    print(f"  {machine()}")
    for name, measured in got.items():
        print(f"  {name}: {measured.text('tokens/s')}")
    goals = {"bare loop": 0.9, "TRL packed": 3.0}
    for name in list(got)[1:]:
        print(ratio_line(f"ours / {name}", turn_by_turn(got["ours"], got[name]), goals.get(name)))


if __name__ == "__main__":
    main()
