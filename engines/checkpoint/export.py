"""Write streamed weights as an ordinary Hugging Face directory.

Promises: equal input gives equal bytes. Memory holds the next tensor, its conversion, and at most
one output file less the size of the largest tensor so far (at most half a file).
Does not promise: a limit for the source of the tensors, nor atomicity, as the caller publishes.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.model_directory import QUANTIZATION
from engines.checkpoint.tensor_files import own_storage, write_tensors

_WEIGHTS = "model"
_METADATA = {"format": "pt"}


def write_model(
    tensors: Iterator[tuple[str, Tensor]],
    hf_dir: Path,
    out_dir: Path,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Write weights next to a copy of their configuration and tokenizer.

    The configuration gets the new dtype and loses its quantization entries. `out_dir` must not hold
    weights yet. A file is closed when it lacks room below `max_shard_bytes` for the largest tensor
    so far, or for half a file.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for source in sorted(hf_dir.iterdir()):
        shutil.copyfile(source, out_dir / source.name)
    path = out_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    for section in (config, config.get("text_config")):
        for name in QUANTIZATION if isinstance(section, dict) else ():
            section.pop(name, None)
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _write_shards(tensors, getattr(torch, dtype), out_dir, max_shard_bytes)


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]],
    target: torch.dtype,
    out_dir: Path,
    max_shard_bytes: int,
) -> None:
    shard: dict[str, Tensor] = {}
    size_bytes = total_bytes = room_bytes = 0
    parts: list[list[str]] = []

    def flush() -> None:
        nonlocal size_bytes
        write_tensors(shard, out_dir / _part_name(len(parts)), metadata=_METADATA)
        parts.append(list(shard))
        shard.clear()
        size_bytes = 0

    for name, tensor in tensors:
        converted = tensor.to(target) if tensor.is_floating_point() else tensor
        stored = own_storage(converted.contiguous())
        source_bytes = 0 if stored is tensor else tensor.untyped_storage().nbytes()
        del tensor, converted  # free it before the next one is made
        room_bytes = max(room_bytes, min(stored.nbytes + source_bytes, max_shard_bytes // 2))
        if shard and size_bytes + stored.nbytes > max_shard_bytes:
            flush()
        shard[name] = stored
        size_bytes += stored.nbytes
        total_bytes += stored.nbytes
        del stored
        if size_bytes + room_bytes > max_shard_bytes:
            flush()
    if shard or not parts:
        flush()
    _name_shards(parts, total_bytes, out_dir)


def _name_shards(parts: list[list[str]], total_bytes: int, out_dir: Path) -> None:
    """Give the files their final names, which include the number of files."""
    if len(parts) == 1:
        (out_dir / _part_name(0)).rename(out_dir / f"{_WEIGHTS}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        final = f"{_WEIGHTS}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (out_dir / _part_name(number)).rename(out_dir / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out_dir / f"{_WEIGHTS}.safetensors.index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"
