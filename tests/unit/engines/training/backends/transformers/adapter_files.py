"""The adapter of a live engine as PEFT loads it, by way of a checkpoint."""

from pathlib import Path

from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.training.backends.merging import extract_adapter
from engines.training.base import BaseEngine


def write_adapter(engine: BaseEngine, directory: Path) -> None:
    """Write it into an existing directory. Collective."""
    checkpoint = directory / "policy" / CHECKPOINT_DIR
    checkpoint.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(checkpoint, step=0)
    if engine.rank == 0:
        extract_adapter(directory / "policy", directory, "float32")
