"""Checkpoints: how long training stands still, and how fast weights are exported.

A model of about 40 M parameters with its AdamW state (about 0.5 GB). Three figures, in turn:
the stall of a save that is waited for, the stall of one that is written in the background (its
copy to host memory), and the export of the weights as safetensors against a plain copy of the
file it writes, each forced to disk.

Run: python tests/benchmarks/bench_checkpoint.py [--repeats N] [--threads N]
"""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import arguments, ratio_line, take_turns, turn_by_turn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from engines.checkpoint.export import write_model
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from hardware.cpu import CPUPlatform
from infra.store.atomic import fsync_tree


def make_engine(directory: Path) -> BaseEngine:
    """An engine with its optimizer; the model is written to `directory`."""
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    engine = create_engine(
        "language_model", directory, TrainingConfig(), OptimizerConfig(), 10, CPUPlatform(), seed=0
    )
    engine.initialize()
    return engine


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    chosen = arguments(__doc__, peer=False)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        gc.freeze()  # as jobs do
        engine = make_engine(root / "model")
        scratch = root / "scratch"

        def fresh() -> Path:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            return scratch

        def waited() -> float:
            path = fresh()
            return seconds(lambda: (engine.save_checkpoint(path, 1), fsync_tree(path)))

        def background() -> float:
            path = fresh()
            pending: list[Callable[[], None]] = []
            taken = seconds(lambda: pending.append(engine.begin_checkpoint(path, 1)))
            pending[0]()
            return taken

        def exported() -> float:
            path = fresh()

            def export() -> None:
                weights = engine.get_per_tensor_param()
                write_model(weights, root / "model", path / "out", "float32", 1 << 40)
                fsync_tree(path)

            return seconds(export)

        def copied() -> float:
            path = fresh()

            def copy() -> None:
                with (path / "copy").open("wb") as out, source.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 24)
                    out.flush()
                    os.fsync(out.fileno())

            return seconds(copy)

        source = root / "model" / "model.safetensors"
        size_gb = source.stat().st_size / 1e9
        taken = take_turns(
            {"waited": waited, "background": background, "export": exported, "copy": copied},
            chosen.repeats,
        )
    print(f"  save, waited for: {taken['waited'].text('s')}")
    print(f"  save, in the background: stall {taken['background'].text('s')}")
    print(ratio_line("stall avoided", turn_by_turn(taken["waited"], taken["background"])))
    for what in ("export", "copy"):
        print(f"  {what}: {taken[what].text('s')}, {size_gb / taken[what].median:.2f} GB/s")
    print(ratio_line("export against a file copy", turn_by_turn(taken["copy"], taken["export"])))


if __name__ == "__main__":
    main()
