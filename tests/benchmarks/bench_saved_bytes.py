"""What autograd holds for backward passes at one time: ours against TRL's trainers.

A Qwen3 of 1.8 M parameters, of which a million are the rows of 8,192 tokens, in float32 without
gradient checkpointing. A pass has about as many tokens on both sides: 2,048, as eight rows of 256
that TRL packs, or as eight pairs of answers, which it pads; ours are micro-batches of at most
2,048. The figure is the peak over the optimizer steps of a turn (`peak_saved.py`), parameters not
counted; it is a count, so that one turn says as much as seven.

Run: python tests/benchmarks/bench_saved_bytes.py [--repeats N] [--threads N]
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench_pairs import PAIRS_PER_STEP, dpo, draw_pairs, reward_model
from bench_sft import LR, ROW_TOKENS, SFT, STEP_TOKENS, draw_steps
from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from peak_saved import saved_bytes
from tiny_model import word, write_model

VOCAB_SIZE = 8_192
ROWS_PER_PASS = PAIRS_PER_PASS = 8
NUM_STEPS = 1
GOAL = 1.0
Turn = Callable[[], float]
"""Train, and say the most bytes that were held at a time."""


def held_in(turn: Callable[[], object]) -> Turn:
    """The turn of one that trains in this process."""

    def measured() -> float:
        with saved_bytes() as saved:
            turn()
        return float(saved.peak)

    return measured


def sft(hf_dir: Path, rows: Path) -> tuple[Turn, dict[str, object]]:
    """Our turn, and what the peer is asked."""
    steps = draw_steps(NUM_STEPS + 3, VOCAB_SIZE)
    rows.write_text(json.dumps([ids for step in steps for ids in step]))
    ours = SFT(hf_dir, ROWS_PER_PASS * ROW_TOKENS)
    asked: dict[str, object] = {
        "row_tokens": ROW_TOKENS,
        "rows_per_step": STEP_TOKENS // ROW_TOKENS,
    }
    asked |= {"strategy": "bfd", "rows_per_pass": ROWS_PER_PASS}
    return held_in(lambda: ours.turn(steps[:NUM_STEPS])), asked


def pairs(task: str, hf_dir: Path, rows: Path) -> tuple[Turn, dict[str, object]]:
    """Likewise, of pairs."""
    texts = draw_pairs((NUM_STEPS + 1) * PAIRS_PER_STEP)
    rows.write_text(json.dumps([[" ".join(map(word, part)) for part in text] for text in texts]))
    ours = {"dpo": dpo, "reward_model": reward_model}[task](hf_dir, texts)
    asked: dict[str, object] = {"pairs_per_step": PAIRS_PER_STEP, "pairs_per_pass": PAIRS_PER_PASS}
    return held_in(ours.turn), asked


def main() -> None:
    """Print bytes of both, and TRL's over ours, for each trainer."""
    options = arguments(__doc__ or "", peer=True)
    print(machine())
    for task in ("sft", "dpo", "reward_model"):
        with tempfile.TemporaryDirectory() as temporary:
            hf_dir, rows = Path(temporary) / "model", Path(temporary) / "rows.json"
            write_model(
                hf_dir, vocab_size=VOCAB_SIZE, intermediate_size=384, max_length=ROW_TOKENS,
                never_stops=False,
            )  # fmt: skip
            ours, asked = sft(hf_dir, rows) if task == "sft" else pairs(task, hf_dir, rows)
            asked |= {"task": task, "model": str(hf_dir), "rows": str(rows), "lr": LR}
            asked |= {"steps": NUM_STEPS, "seed": 0, "saved": True}
            with Peer(options.peer_python, "trl_peer.py", options.threads, deadline_s=600) as trl:
                got = take_turns(
                    {
                        "ours": ours,
                        "TRL": lambda trl=trl, asked=asked: trl.ask(**asked)["saved_bytes"],
                    },
                    options.repeats,
                )
        print(task)
        for name, taken in got.items():
            print(f"  {name}: {taken.text('bytes')}")
        print(ratio_line("TRL / ours", turn_by_turn(got["TRL"], got["ours"]), GOAL))


if __name__ == "__main__":
    main()
