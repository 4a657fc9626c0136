"""Bytes, errors and resharding of sharded files (two ranks: tests/contracts/test_backend.py)."""

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engines.checkpoint import sharded
from engines.checkpoint.sharded import ShardedReader, load_sharded, own_regions, save_regions
from engines.checkpoint.tensor_files import write_tensors
from engines.errors import CheckpointError


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn(5, 3, generator=generator),
        "a.weight": torch.randn(7, generator=generator).bfloat16(),
        "c.view": torch.randn(4, 6, generator=generator).t(),
    }


def piece(path: Path, rank: int, pieces: dict[str, tuple[list[int], torch.Tensor]]) -> None:
    """Write a shard as a rank of another world size would."""
    info = {name: {"saved_offsets": offsets} for name, (offsets, _) in pieces.items()}
    save_file(
        {name: tensor.contiguous() for name, (_, tensor) in pieces.items()},
        path / f"shard-{rank:05d}-00000.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps(info)},
    )


def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "_MAX_FILE_BYTES", 80)
    saved = tensors(0)
    save_regions(tmp_path, own_regions(saved))
    assert len(list(tmp_path.iterdir())) == 2
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_sharded(tmp_path, loaded)
    reader = ShardedReader(tmp_path)
    assert reader.names() == sorted(saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(reader.read(name), tensor)
        assert reader.shape(name) == tuple(tensor.shape)


def test_equal_state_gives_equal_bytes_and_one_metadata_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_regions(
            tmp_path / name, own_regions(dict(sorted(tensors(1).items(), reverse=name == "b")))
        )
    (first,), (second,) = (list((tmp_path / name).iterdir()) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    # safetensors writes several keys in random order, so more than one would break equality.
    with safe_open(first, framework="pt") as file:
        assert len(file.metadata()) == 1


def test_pieces_of_other_world_sizes_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    piece(tmp_path, 0, {"x": ([0, 0], whole[:3])})
    piece(tmp_path, 1, {"x": ([3, 0], whole[3:, :1]), "y": ([0], torch.ones(2))})
    piece(tmp_path, 2, {"x": ([3, 1], whole[3:, 1:])})
    loaded = {"x": torch.zeros(5, 3)}
    load_sharded(tmp_path, loaded)
    assert torch.equal(loaded["x"], whole)
    assert torch.equal(ShardedReader(tmp_path).read("x"), whole)


def test_what_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no shard"):
        ShardedReader(tmp_path)
    piece(tmp_path, 0, {"x": ([0, 0], torch.zeros(3, 3))})
    piece(tmp_path, 2, {"x": ([4, 0], torch.zeros(1, 3))})
    with pytest.raises(CheckpointError, match="pieces of x are missing"):
        ShardedReader(tmp_path).read("x")
    for wanted in ({"z": torch.zeros(2)}, {"x": torch.zeros(9, 3)}):
        with pytest.raises(CheckpointError, match="cannot load"):
            load_sharded(tmp_path, wanted)


def test_failing_disk_raises_os_error_not_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sharded, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_regions(tmp_path, own_regions(tensors(0)))
    with pytest.raises(CheckpointError, match="cannot load"):
        load_sharded(tmp_path / "absent", tensors(0))


def test_a_disk_that_takes_no_more_is_an_os_error_with_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_tensors({"x": torch.zeros(1000)}, tmp_path / "x.safetensors")
        with pytest.raises(OSError, match="File too large"):
            save_regions(tmp_path, own_regions({"x": torch.zeros(1000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert refused.value.filename == str(tmp_path / "x.safetensors")


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_regions(tmp_path, own_regions(tensors(2)))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}
