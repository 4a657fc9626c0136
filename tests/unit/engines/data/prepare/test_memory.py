"""The memory of preprocessing: bounded by batches, not by rows."""

import json
from pathlib import Path

import pytest
from peak_memory import peak_bytes

NUM_ROWS = 70_000
"""More than a row group has, so that one is always full."""
MAX_GROWTH_BYTES = 400 * NUM_ROWS
"""A row is read one and a half times and is some kilobytes as objects, its token ids among them."""
PROGRAM = """
import sys
from pathlib import Path
from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.prepare.dataset import build_dataset

source = {"path": sys.argv[1]}
data = DataConfig.model_validate({"rl": [source, {**source, "limit": int(sys.argv[3])}]})
build_dataset(data, ModelConfig(init="random", max_length=128), 0, Path(sys.argv[2]))
"""


def peak_of(directory: Path, num_rows: int) -> int:
    """Of a process that reads so many rows and a sample of them, and tokenizes all; in bytes."""
    source = directory / f"{num_rows}.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            prompt = f"{number} {'twice as many clips ' * 4}"
            row = {"prompt": prompt, "reward_model": {"ground_truth": str(number)}}
            file.write(f"{json.dumps(row)}\n")
    arguments = [str(source), str(directory / f"out-{num_rows}"), str(num_rows // 2)]
    return peak_bytes(["-c", PROGRAM, *arguments], deadline_s=300.0)


@pytest.mark.slow
def test_twice_the_rows_need_no_more_memory(tmp_path: Path) -> None:
    once, twice = (peak_of(tmp_path, num_rows) for num_rows in (NUM_ROWS, 2 * NUM_ROWS))
    assert twice - once < MAX_GROWTH_BYTES
