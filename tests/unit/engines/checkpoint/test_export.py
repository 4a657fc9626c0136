"""Which weights come into which file, and what becomes of them there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.checkpoint.export import write_model

KB = 1000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float64", "size": 1}))
    return source


def tensor_of(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(seed))


def files_of(
    tensors: dict[str, Tensor], source: Path, max_shard_bytes: int, dtype: str = "float32"
) -> list[dict[str, Tensor]]:
    """The tensors of each written file, in the order of the files."""
    out = source.parent / f"out-{max_shard_bytes}-{dtype}"
    write_model(iter(tensors.items()), source, out, dtype, max_shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert {out / name for name in index["weight_map"].values()} == {*files}
    return [load_file(file) for file in files]


def test_files_leave_room_for_the_next_tensor(source: Path) -> None:
    tensors = {f"w{i:02d}": tensor_of(KB, i) for i in range(20)}
    files = files_of(tensors, source, 5 * KB)
    assert [len(file) for file in files] == [5] * 4
    files = files_of(tensors, source, 5 * KB, "bfloat16")  # half a KB, and 1 KB to make it of
    assert [len(file) for file in files] == [8, 8, 4]
    written = {name: tensor for file in files for name, tensor in file.items()}
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name].bfloat16()) for name in tensors)


def test_a_large_tensor_does_not_scatter_those_after_it(source: Path) -> None:
    tensors = {"embedding": tensor_of(9 * KB)} | {f"w{i:02d}": tensor_of(KB, i) for i in range(20)}
    files = files_of(tensors, source, 6 * KB)
    assert [*files[0]] == ["embedding"]
    assert [len(file) for file in files[1:]] == [4] * 5


def test_a_slice_does_not_bring_its_whole_storage(source: Path) -> None:
    whole = tensor_of(40 * KB)
    (file,) = files_of({"part": whole[: KB // 4]}, source, 100 * KB)
    assert torch.equal(file["part"], whole[: KB // 4])
    assert (source.parent / "out-100000-float32/model.safetensors").stat().st_size < 2 * KB
    config = json.loads((source.parent / "out-100000-float32/config.json").read_text())
    assert config == {"dtype": "float32", "size": 1}


def test_what_is_no_number_of_the_dtype_stays(source: Path) -> None:
    (file,) = files_of({"ids": torch.arange(4)}, source, KB, "bfloat16")
    assert torch.equal(file["ids"], torch.arange(4))


def test_config_exported_with_plain_weights_omits_quantization(tmp_path: Path) -> None:
    source = tmp_path / "quantized"
    source.mkdir()
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    config = {"model_type": "x", **quantized, "text_config": {"hidden_size": 8, **quantized}}
    (source / "config.json").write_text(json.dumps(config))
    write_model(iter({"w": tensor_of(KB, 0)}.items()), source, tmp_path / "out", "bfloat16", KB)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {
        "model_type": "x", "dtype": "bfloat16", "text_config": {"hidden_size": 8}
    }  # fmt: skip
