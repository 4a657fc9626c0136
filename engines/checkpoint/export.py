"""Merge a sharded policy checkpoint into an ordinary Hugging Face directory.

Promises: names, shapes and values are those `save_pretrained` of the whole model would write
(tied weights once, fused experts split); every weight of the architecture is there; equal input
gives equal bytes; at most one output file and one tensor are in memory at a time.
Does not promise atomicity: the caller publishes the directory.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.engine_state import TENSORS_DIR
from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import ShardedReader
from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.errors import CheckpointError

HF_DIR = "hf"
_PREFIX = "model."
_WEIGHTS = "model"
_METADATA = {"format": "pt"}


def merge_checkpoint(policy_dir: Path, out_dir: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write weights, configuration and tokenizer of a policy.

    Args:
        policy_dir: a `policy` artifact: `checkpoint/` and `hf/`.
        out_dir: created if needed; must not hold weights yet.
        dtype: of the written weights, `float32` or `bfloat16`.
        max_shard_bytes: size of one weight file, unless a single tensor is larger.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for source in sorted((policy_dir / HF_DIR).iterdir()):
        shutil.copyfile(source, out_dir / source.name)
    _set_dtype(out_dir / "config.json", dtype)
    tensors = _policy_tensors(policy_dir, getattr(torch, dtype))
    _write_shards(tensors, out_dir, max_shard_bytes)


def _policy_tensors(policy_dir: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights by hub name, in the order of the architecture."""
    config = AutoConfig.from_pretrained(policy_dir / HF_DIR, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    reader = ShardedReader(policy_dir / CHECKPOINT_DIR / TENSORS_DIR)
    stored = {name: reader.shape(name) for name in reader.names() if name.startswith(_PREFIX)}
    expected = {_PREFIX + name: tuple(tensor.shape) for name, tensor in named_state(model)}
    if stored != expected:
        wrong = sorted(name for name, _ in stored.items() ^ expected.items())
        raise CheckpointError(
            f"{policy_dir}: the checkpoint does not fit hf/config.json at {', '.join(wrong[:3])}"
        )
    whole = ((name.removeprefix(_PREFIX), reader.read(name)) for name in expected)
    for name, tensor in HubNames(model).stream(whole):
        yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


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
        shard[name] = tensor.clone() if tensor._base is not None else tensor
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
