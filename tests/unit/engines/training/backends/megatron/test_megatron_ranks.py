"""The Megatron engine at world size 2: one launch of two processes for all cases."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.launch import launch
from rlhf.testing.plain_loop import train_plainly
from rlhf.testing.tiny_models import write_tiny_models
from transformers import AutoConfig, AutoModelForCausalLM

PROGRAM = Path(__file__).parent / "megatron_cases.py"
DEADLINE_S = 400.0
LOSS, NORM = 5e-5, 1e-4
pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 37, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "softmax_first": {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": False,
    },
}  # fmt: skip
"""Words that do not divide over two ranks; a bias on q, k, v; scaled rotary frequencies; routing
probabilities that do not sum to 1."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    write_tiny_models(root)
    for name, peculiar in MODELS.items():
        config = AutoConfig.for_model(**{**SHAPE, **peculiar})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel())))
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    launch([str(PROGRAM), f"--root={root}"], 2, root, DEADLINE_S)
    files = [root / f"results-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def case(results: dict[str, Any], name: str) -> dict[str, Any]:
    found = results.get(name, {"error": "an earlier case failed"})
    assert "error" not in found, found["error"]
    return found


def check(rows: list[list[float]], expected: list[Any]) -> None:
    assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], abs=LOSS)
    assert [row[1] for row in rows] == pytest.approx([row[1] for row in expected], rel=NORM)


@pytest.mark.parametrize(
    ("name", "model"),
    [("qwen2",) * 2, ("llama3",) * 2, ("softmax_first",) * 2, ("tied_virtual", "qwen3")],
)
def test_trains_as_a_plain_loop_does(
    ranks: list[dict[str, Any]], root: Path, name: str, model: str
) -> None:
    check(case(ranks[0], "case_architectures")[name], train_plainly(root / model))


def test_a_vocabulary_cut_over_ranks(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        errors = case(results, "case_vocabulary_over_ranks")
        assert errors.pop("no_rows") == 0
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("layout", ["tensor", "whole", "pipeline", "context"])
def test_an_adapter_is_that_of_fsdp2(ranks: list[dict[str, Any]], layout: str) -> None:
    adapter = case(ranks[0], "case_adapter_as_in_fsdp2")
    check(adapter[layout], adapter["fsdp2"])
    assert adapter[f"{layout}_weights"] < 1e-3
    check(adapter["some"], adapter["some_fsdp2"])
    assert adapter["saved_alike"]


def test_checkpoints_move_between_backends(ranks: list[dict[str, Any]]) -> None:
    found = case(ranks[0], "case_checkpoints_between_backends")
    assert len(found) == 3
    for steps in found.values():
        check(steps["there"], steps["here"])
        assert steps["back"] == steps["here"]


def test_frozen_parameters(ranks: list[dict[str, Any]]) -> None:
    frozen = case(ranks[0], "case_frozen")
    # After three steps rounding alone moves the norm of the few weights left by percents.
    check(frozen["steps"][:3], frozen["expected"][:3])
    assert frozen["changed"]
    kept = ("embed_tokens", ".mlp.", ".1.self_attn.q_proj")
    assert not [name for name in frozen["changed"] if any(part in name for part in kept)]
    assert "one matrix in Megatron-Core" in frozen["problems"]["*.q_proj.weight"]
    assert "fits no parameter" in frozen["problems"]["nothing"]


def test_engines_of_two_layouts_take_turns(ranks: list[dict[str, Any]]) -> None:
    found = case(ranks[0], "case_two_layouts")
    assert found["in_turns"] == found["alone"]
    assert found["unchanged"]


@pytest.mark.parametrize("layout", ["data", "tensor", "virtual", "context", "expert"])
def test_training_repeats_the_experts_of_inference(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    for results in ranks:
        found = case(results, "case_router_replay")[layout]
        replayed, plain = found["losses"]
        assert replayed == pytest.approx(plain, abs=1e-6)
        num_calls = len(found["inferred"])
        # Recomputed layers route a second time, in the backward pass.
        assert len(found["trained"]) == 2 * num_calls > 0
        assert all(found["trained"].count(routes) == 2 for routes in found["inferred"])
        assert not any(routes in found["free"] for routes in found["inferred"])


def test_a_reference_engine_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    assert all(case(results, "case_no_trace")["generator"] for results in ranks)


def test_padding_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert max(case(ranks[0], "case_padding").values()) < 1e-5
