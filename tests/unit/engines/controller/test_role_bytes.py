"""What a rank of two holds of each role: its share of the weights, and of Adam's state."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.launch import launch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

PROGRAM = Path(__file__).parent / "role_bytes_ranks.py"
WORLD_SIZE, LORA_RANK, DEADLINE_S = 2, 4, 120.0
SLACK = 1024
"""Bytes beside weights and Adam's moments: its step counts, rotary frequencies."""
Shape = tuple[int, ...]


@pytest.fixture(scope="module")
def found(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    root = tmp_path_factory.mktemp("role-bytes")
    arguments = [str(PROGRAM), f"--root={root}", f"--model={model_dir}"]
    launch(arguments, WORLD_SIZE, root, DEADLINE_S)
    files = [root / f"results-{rank}.json" for rank in range(WORLD_SIZE)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))


def share_of(shapes: Iterable[Shape], rank: int) -> int:
    """float32 bytes of one rank, where every tensor is cut into rows, the larger part first."""
    total = 0
    for shape in shapes:
        rows = -(-shape[0] // WORLD_SIZE)
        own = min(rows, max(0, shape[0] - rank * rows))
        total += 4 * own * torch.Size(shape[1:]).numel()
    return total


def weights(model: nn.Module) -> list[Shape]:
    return [tuple(parameter.shape) for parameter in model.parameters()]


def value_weights(model: nn.Module) -> list[Shape]:
    """The head is tied to the embedding; that of values comes beside it."""
    hidden_size = model.get_input_embeddings().weight.shape[1]
    return [*weights(model), (1, hidden_size), (1,)]


def adapter_weights(model: nn.Module) -> list[Shape]:
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    return [
        shape
        for module in linear
        for shape in ((LORA_RANK, module.in_features), (module.out_features, LORA_RANK))
    ]


def expected(model: nn.Module, rank: int, lora: bool) -> dict[str, dict[str, int]]:
    """Adam keeps two numbers for each one that trains."""
    base, adapter = share_of(weights(model), rank), share_of(adapter_weights(model), rank)
    critic = share_of(value_weights(model), rank)
    roles = {"critic": {"parameters": critic, "optimizer": 2 * critic}}
    if lora:
        # Its policy without the adapter is the reference.
        return {"policy": {"parameters": base + adapter, "optimizer": 2 * adapter}, **roles}
    return {
        "policy": {"parameters": base, "optimizer": 2 * base},
        "reference": {"parameters": base, "optimizer": 0},
        **roles,
    }


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("name", ["whole", "lora"])
def test_a_rank_holds_its_share_of_each_role_and_nothing_else(
    name: str, rank: int, found: list[dict[str, Any]], model: nn.Module
) -> None:
    """A step later too: no gradient, gathered weight or activation is left."""
    wanted, got = expected(model, rank, lora=name == "lora"), found[rank][name]
    assert got["at_start"] == wanted
    assert got["after_a_step"] == wanted
    total = sum(size for role in wanted.values() for size in role.values())
    for when in ("all_at_start", "all_after_a_step"):
        assert 0 <= got[when] - total <= SLACK
