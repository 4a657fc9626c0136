"""An engine's files: equal for equal states, refused when something is missing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engines.checkpoint.engine_state import (
    TENSORS_DIR,
    EngineScalars,
    read_scalars,
    save_engine_state,
)
from engines.checkpoint.sharded import Region
from engines.errors import CheckpointError
from engines.training.backends.fsdp.engine import FSDP2Engine
from hardware.detection import create

MakePolicy = Callable[..., tuple[FSDP2Engine, Path]]


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_a_directory_that_cannot_be_made_is_told_after_all_regions(tmp_path: Path) -> None:
    """Producing regions is collective: a rank that stops early leaves the others waiting."""
    (tmp_path / TENSORS_DIR).touch()
    made: list[int] = []

    def walk() -> Iterator[Region]:
        for i in range(3):
            made.append(i)
            yield Region(f"w{i}", (0,), torch.ones(1))

    scalars = EngineScalars(
        step=1, num_steps=1, schedule_step=1, num_optimizer_steps=1, world_size=1, backend="fsdp2"
    )
    with pytest.raises(FileExistsError):
        save_engine_state(tmp_path, walk(), scalars, create("cpu"))
    assert made == [0, 1, 2]


def test_save_load_save_gives_the_same_bytes(
    make_policy: MakePolicy, make_engine: Callable[..., FSDP2Engine], tmp_path: Path
) -> None:
    _, policy = make_policy("qwen3")
    engine = make_engine(tmp_path / "model", load_weights=False)
    assert engine.load_checkpoint(policy / "checkpoint") == 2
    (tmp_path / "again").mkdir()
    engine.save_checkpoint(tmp_path / "again", step=2)
    first = contents(policy / "checkpoint")
    assert first == contents(tmp_path / "again")
    assert sorted(first) == [
        "engine.json",
        "rng/rank-00000.safetensors",
        "tensors/shard-00000-00000.safetensors",
    ]
    scalars = json.loads(first["engine.json"])
    assert scalars == {
        "schema_version": 1, "step": 2, "num_steps": 2, "schedule_step": 2,
        "num_optimizer_steps": 2, "world_size": 1, "backend": "fsdp2", "lora": None,
        "num_averaged": None,
    }  # fmt: skip


def test_random_generators_are_restored(
    make_policy: MakePolicy, make_engine: Callable[..., FSDP2Engine], tmp_path: Path
) -> None:
    _, policy = make_policy("qwen3")
    engine = make_engine(tmp_path / "model")
    engine.load_checkpoint(policy / "checkpoint")
    drawn = torch.rand(4)
    engine.load_checkpoint(policy / "checkpoint")
    assert torch.equal(torch.rand(4), drawn)
    engine.load_checkpoint(policy / "checkpoint", optimizer=False)
    assert not torch.equal(torch.rand(4), drawn)
    assert engine.num_steps == 2


def test_bad_input_row_39_resume_without_optimizer_is_refused(
    make_policy: MakePolicy, make_engine: Callable[..., FSDP2Engine], tmp_path: Path
) -> None:
    _, policy = make_policy("qwen3")
    checkpoint = policy / "checkpoint"
    engine = make_engine(tmp_path / "model")
    shard = checkpoint / "tensors" / "shard-00000-00000.safetensors"
    weights = {name: w for name, w in load_file(shard).items() if name.startswith("model.")}
    with safe_open(shard, "pt") as opened:
        save_file(weights, shard, opened.metadata())
    with pytest.raises(CheckpointError) as refused:
        engine.load_checkpoint(checkpoint)
    assert str(refused.value) == (
        f"{checkpoint}: part 'optimizer' is absent; a stage continues only from a complete "
        "checkpoint; begin the stage anew with --force, or export its weights and name them in "
        "model.path of a new run"
    )


def test_bad_input_row_39_what_is_damaged_is_refused(
    make_policy: MakePolicy, make_engine: Callable[..., FSDP2Engine], tmp_path: Path
) -> None:
    _, policy = make_policy("qwen3")
    checkpoint = policy / "checkpoint"
    engine = make_engine(tmp_path / "model")
    (checkpoint / "rng" / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00000.safetensors is absent"):
        engine.load_checkpoint(checkpoint)
    (checkpoint / "tensors" / "shard-00000-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot load"):
        engine.load_checkpoint(checkpoint)
    (checkpoint / "engine.json").write_text('{"step": 2}')
    with pytest.raises(CheckpointError, match=r"engine.json"):
        read_scalars(checkpoint)
