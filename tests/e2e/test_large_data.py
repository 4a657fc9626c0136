"""The job `preprocess` on a file that is as large as its memory may be."""

import json
from pathlib import Path

import numpy as np
import pytest
from job_bench import HOLDER, Bench
from peak_memory import peak_bytes
from safetensors.numpy import save_file

from infra.store.storage import open_storage

NUM_ROWS = 1_000_000
MAX_PEAK_BYTES = 10**9


def model_directory(path: Path) -> str:
    """A model whose tokenizer transformers alone reads: the stage that trains counts tokens."""
    path.mkdir()
    (path / "config.json").write_text('{"max_position_embeddings": 4096}', encoding="utf-8")
    (path / "tokenizer.model").write_bytes(b"\0")
    save_file({"weight": np.zeros(1, np.float32)}, path / "model.safetensors")
    return str(path)


def gsm8k_rows(path: Path) -> str:
    """A kilobyte a row, each question another one."""
    text = "Natalia sold twice as many clips in May as in April. " * 19
    with path.open("w", encoding="utf-8") as file:
        for number in range(NUM_ROWS):
            row = {"question": f"{number} {text}", "answer": f"It is so.\n#### {number}"}
            file.write(f"{json.dumps(row)}\n")
    assert path.stat().st_size > MAX_PEAK_BYTES
    return str(path)


@pytest.mark.stacks
def test_a_million_rows_fit_a_gigabyte(tmp_path: Path) -> None:
    config = {
        "data": {"rl": [{"path": gsm8k_rows(tmp_path / "train.jsonl")}]},
        "model": {"path": model_directory(tmp_path / "model")},
    }
    spec = Bench(tmp_path).spec("preprocess", config, {})
    store = open_storage(spec.store_uri)
    store.attempts.hold(spec.fingerprint, HOLDER, spec.attempt)
    store.channel(spec.fingerprint).write_specification(spec)
    peak = peak_bytes(spec.job_argv, deadline_s=1200.0)
    record = store.lookup(spec.fingerprint)
    assert record is not None
    assert record.metrics["num_rl"] == NUM_ROWS
    assert peak < MAX_PEAK_BYTES, f"{peak / 1e6:.0f} MB"
