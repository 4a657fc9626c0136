"""Preprocessing: rows of GSM8K's layout to checked parquet, against `datasets.map`.

Both read the same JSON lines and write RL rows (prompt, ability, ground truth) as parquet. The peer
maps the same function over `datasets.load_dataset`, with one process, as ours has one; its cache is
fresh in every turn. Ours makes a whole data set: besides it checks every row against the schema,
compares prompts, and counts; it has no tokenizer, so lengths are not checked.

Run: python tests/benchmarks/bench_preprocess.py [--repeats N]
"""

import json
import random
import tempfile
import time
from pathlib import Path

from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn

from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.prepare.dataset import build_dataset

NUM_ROWS = 20_000
GOAL = 1.0
WORDS = ("apples", "Natalia", "sold", "twice", "as", "many", "in", "May", "the", "clips", "and")


def write_source(path: Path) -> None:
    """Questions of 30 to 60 words and worked answers of as many, with calculator notes."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(30, 60)))

    with path.open("w", encoding="utf-8") as file:
        for number in range(NUM_ROWS):
            answer = f"{text()} <<{number}/2={number / 2}>>{number / 2}\n#### {number}"
            row = {"question": f"{number} {text()}?", "answer": answer}
            file.write(json.dumps(row) + "\n")


def ours(source: Path, directory: Path) -> float:
    """Rows per second."""
    data = DataConfig.model_validate({"rl": [{"format": "gsm8k", "path": str(source)}]})
    with tempfile.TemporaryDirectory(dir=directory) as out:
        start = time.perf_counter()
        summary = build_dataset(data, ModelConfig(path="none"), 0, Path(out) / "dataset")
        assert summary.rl.num_rows == NUM_ROWS
        return NUM_ROWS / (time.perf_counter() - start)


def main() -> None:
    """Print rows per second of both, and the ratio."""
    options = arguments(__doc__ or "", peer=True)
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "rows.jsonl"
        write_source(source)
        with Peer(options.peer_python, "trl_peer.py", options.threads, deadline_s=600) as peer:
            request = {"task": "preprocess", "source": str(source)}
            got = take_turns(
                {
                    "ours": lambda: ours(source, Path(temporary)),
                    "datasets.map": lambda: peer.ask(**request)["rows_per_s"],
                },
                options.repeats,
            )
    for name, measured in got.items():
        print(f"  {name}: {measured.text('rows/s')}")
    ratio = turn_by_turn(got["ours"], got["datasets.map"])
    print(ratio_line("ours / datasets.map", ratio, GOAL))


if __name__ == "__main__":
    main()
