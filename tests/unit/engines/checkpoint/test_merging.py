"""Merged directories load in transformers and hold exactly the engine's weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.checkpoint.model_directory import stored_tensor_names
from engines.errors import CheckpointError
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.merging import merge_checkpoint
from engines.types import TokenBatch

MakePolicy = Callable[..., tuple[FSDP2Engine, Path]]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("gpt2", {"n_positions": 64}),
        ("qwen3_moe", MOE),
    ],
)
@pytest.mark.parametrize("max_shard_bytes", [10_000, 10**9])
def test_reloads_with_equal_weights_and_logits(
    make_policy: MakePolicy, tmp_path: Path, model_type: str, config: dict[str, Any],
    max_shard_bytes: int,
) -> None:  # fmt: skip
    engine, policy = make_policy(model_type, **config)
    merged = tmp_path / "merged"
    merge_checkpoint(policy, merged, "float32", max_shard_bytes)
    # What save_pretrained writes for this architecture is the measure of the names.
    assert stored_tensor_names(merged) == stored_tensor_names(tmp_path / "model")
    assert (merged / "model.safetensors").exists() == (max_shard_bytes == 10**9)
    stored = {k: v for file in merged.glob("*.safetensors") for k, v in load_file(file).items()}
    streamed = dict(engine.get_per_tensor_param())
    assert stored.keys() == streamed.keys()
    assert all(torch.equal(stored[name], streamed[name]) for name in stored)
    model, info = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(2, 20)
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    ours = engine.infer_batch(TokenBatch.from_sequences([ids.tolist()])).logprobs_T[1:]
    assert torch.allclose(ours, logprobs.gather(1, ids[1:, None]).squeeze(1), atol=1e-5)


def test_bfloat16_and_equal_bytes(make_policy: MakePolicy, tmp_path: Path) -> None:
    engine, policy = make_policy("qwen3")
    for name in ("a", "b"):
        merge_checkpoint(policy, tmp_path / name, "bfloat16", 20_000)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in files
    )
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(model[name], tensor.bfloat16())


def test_shards_stay_under_their_limit(make_policy: MakePolicy, tmp_path: Path) -> None:
    _, policy = make_policy("qwen3")
    merge_checkpoint(policy, tmp_path / "merged", "float32", 20_000)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    total = 0
    for shard in shards:
        with safe_open(tmp_path / "merged" / shard, framework="pt") as file:
            assert dict(file.metadata()) == {"format": "pt"}
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total


def test_a_missing_weight_is_an_error(make_policy: MakePolicy, tmp_path: Path) -> None:
    _, policy = make_policy("qwen3")
    (shard,) = (policy / "checkpoint" / "tensors").glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(shard)
    tensors.pop("model.model.norm.weight")
    save_file(tensors, shard, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"does not fit .*config.json at model.norm"):
        merge_checkpoint(policy, tmp_path / "merged", "float32", 10**9)
