"""Write streamed weights as an ordinary Hugging Face directory.

Promises: equal input gives equal bytes; at most one output file and one tensor are in memory at a
time. Does not promise atomicity: the caller publishes the directory.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_WEIGHTS = "model"
_METADATA = {"format": "pt"}


def write_model(
    tensors: Iterator[tuple[str, Tensor]],
    hf_dir: Path,
    out_dir: Path,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Write weights beside a copy of their configuration and tokenizer.

    Args:
        tensors: whole weights by hub name, in the order of the architecture.
        hf_dir: configuration and tokenizer.
        out_dir: created if needed; must not hold weights yet.
        dtype: of the written weights, `float32` or `bfloat16`.
        max_shard_bytes: size of one weight file, unless a single tensor is larger.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for source in sorted(hf_dir.iterdir()):
        shutil.copyfile(source, out_dir / source.name)
    _set_dtype(out_dir / "config.json", dtype)
    target = getattr(torch, dtype)
    _write_shards(_converted(tensors, target), out_dir, max_shard_bytes)


def _converted(
    tensors: Iterator[tuple[str, Tensor]], target: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """As they are written; no variable keeps one while the next one is made."""
    for name, tensor in tensors:
        stored = (tensor.to(target) if tensor.is_floating_point() else tensor).contiguous()
        del tensor
        yield name, stored
        del stored


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], out_dir: Path, max_shard_bytes: int
) -> None:
    shard: dict[str, Tensor] = {}
    size_bytes = total_bytes = 0
    parts: list[list[str]] = []

    def flush() -> None:
        save_file(shard, out_dir / _part_name(len(parts)), metadata=_METADATA)
        parts.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size_bytes + num_bytes > max_shard_bytes:
            flush()
            size_bytes = 0
        # A slice of a larger tensor would drag its whole storage into the file.
        is_part = tensor.untyped_storage().nbytes() != num_bytes
        shard[name] = tensor.clone() if is_part else tensor
        del tensor  # or it would live beside the next one, when it is no longer in the shard
        size_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    _name_shards(parts, total_bytes, out_dir)


def _name_shards(parts: list[list[str]], total_bytes: int, out_dir: Path) -> None:
    """Give the files their final names, which tell how many there are."""
    if len(parts) == 1:
        (out_dir / _part_name(0)).rename(out_dir / f"{_WEIGHTS}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        final = f"{_WEIGHTS}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (out_dir / _part_name(number)).rename(out_dir / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (out_dir / f"{_WEIGHTS}.safetensors.index.json").write_text(text, encoding="utf-8")


def _part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
