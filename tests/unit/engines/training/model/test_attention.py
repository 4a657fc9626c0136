"""Packed attention against transformers' own, one sequence at a time, for several architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.config.training import TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.transformers import build
from engines.training.model import attention
from engines.training.model.attention import Packing, _batched_runs, packed_attention
from engines.training.spec import EngineSpec
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

LENGTHS = [3, 9, 14, 9, 9, 1, 20]


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 37, (n,), generator=generator) for n in LENGTHS]


def one_by_one(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    """(T, V) logits of each sequence on its own."""
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
        )


def engine_for(path: Path) -> FSDP2Engine:
    engine = FSDP2Engine(EngineSpec(path, TrainingConfig(), None, 1, CPUPlatform(), 0))
    engine.initialize()
    return engine


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"sliding_window": 6}),
        ("gemma3_text", {"sliding_window": 6}),
        ("gpt2", {"n_positions": 64}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_packed_equals_one_at_a_time(
    make_model: Callable[..., Path], model_type: str, config: dict[str, Any]
) -> None:
    path = make_model(model_type, **config)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    sequences = rows()
    expected = one_by_one(model, sequences).log_softmax(-1)
    batch = TokenBatch.from_sequences([ids.tolist() for ids in sequences])
    logprobs_T = engine_for(path).infer_batch(batch).logprobs_T
    predicted = torch.cat([torch.arange(len(ids)) for ids in sequences]) > 0
    previous = predicted.nonzero().squeeze(1) - 1
    wanted = expected[previous].gather(1, batch.input_ids_T[predicted, None]).squeeze(1)
    assert torch.allclose(logprobs_T[predicted], wanted, atol=2e-6)
    assert (logprobs_T[~predicted] == 0).all()


@pytest.mark.parametrize(
    ("model_type", "config", "feature"),
    [
        ("gemma2", {}, "a gemma2 model with attention scores with a soft cap; need"),
        ("bloom", {"n_head": 4}, "cannot be replaced"),
        ("gptj", {"rotary_dim": 8}, "cannot be replaced"),
        ("nemotron", {}, "layers that pass no keyword arguments to their attention"),
        ("roberta", {"is_decoder": True}, "positions count from its padding token on"),
        ("bert", {}, "later tokens"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("qwen3_next", {"num_experts": 2}, "linear_attention"),
    ],
)
def test_what_would_be_wrong_is_refused(
    make_model: Callable[..., Path], model_type: str, config: dict[str, Any], feature: str
) -> None:
    batch = TokenBatch.from_sequences([[3, 4, 5], [6, 7]])
    with pytest.raises(ConfigError, match=feature):
        engine_for(make_model(model_type, **config)).infer_batch(batch)


@pytest.mark.parametrize(
    ("model_type", "config", "feature"),
    [
        ("gemma2", {}, "needs softcap"),
        ("vaultgemma", {}, "needs softcap"),
        ("doge", {}, "needs a mask"),
        ("flint", {}, "needs s_aux"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "needs s_aux"),
        ("granite_swa", {}, "needs s_aux"),
        ("granitemoe_swa", {"num_local_experts": 2, "num_experts_per_tok": 1}, "needs s_aux"),
        (
            "mimo_v2_flash",
            {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
            "needs s_aux",
        ),
        ("nemotron", {}, "NemotronAttention is not told where packed sequences end"),
    ],
)
def test_every_refused_attention_config_fails_the_forward_pass(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    config: dict[str, Any],
    feature: str,
) -> None:
    """No family is refused for nothing; a transformers release that repairs one ends its row."""
    path = make_model(model_type, **config)
    with pytest.raises(ConfigError, match=f"a {model_type} model with .*; need .*; choose"):
        engine_for(path)
    monkeypatch.setattr(build, "check_packed", lambda hf_dir, config: None)
    with pytest.raises(ConfigError, match=feature):
        engine_for(path).infer_batch(TokenBatch.from_sequences([[3, 4, 5], [6, 7]]))


# Three ways of packing that transformers accepts and that let sequences see each other. They
# are why `rl_varlen` exists; a transformers release that repairs one may lift its test.


def _packed(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return {"input_ids": torch.cat(sequences)[None], "position_ids": positions[None]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_cache": False, "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64)},
    ],
    ids=["cache_left_on", "all_ones_mask"],
)
def test_sdpa_with_position_ids_leaks(qwen3_dir: Path, arguments: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        qwen3_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    sequences = rows()
    with torch.no_grad():
        logits = model(**_packed(sequences), **arguments).logits[0]
    assert (logits - one_by_one(model, sequences)).abs().max() > 1e-3


def test_eager_with_a_boolean_mask_leaks(qwen3_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        qwen3_dir, dtype=torch.float32, attn_implementation="eager"
    )
    sequences = rows()
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (index[:, None] == index[None, :]).tril()[None, None]
    with torch.no_grad():
        logits = model(**_packed(sequences), attention_mask=mask, use_cache=False).logits[0]
    assert (logits - one_by_one(model, sequences)).abs().max() > 1e-3


def dense(q: Any, k: Any, v: Any, lengths: list[int], window: int | None) -> torch.Tensor:
    """Softmax attention by its formula, with one (T, T) mask; (T, H, D) in and out."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(index))[:, None] - torch.arange(len(index))[None, :]
    allowed = (index[:, None] == index[None, :]) & (distance >= 0)
    if window:
        allowed &= distance < window
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 2**20),
)
def test_forward_and_backward_by_the_formula(
    lengths: list[int], window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, heads, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    out_grad = torch.randn(total, 4, 4, generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = Packing.from_cu_seqlens(bounds)
    ours = _batched_runs([q, k, v], packing, None, window)
    expected = dense(q, k, v, lengths, window)
    assert torch.allclose(ours, expected, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), out_grad),
        torch.autograd.grad(expected, (q, k, v), out_grad),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_runs_group_neighbours_only() -> None:
    bounds = torch.tensor([0, 2, 4, 7, 9, 9], dtype=torch.int32)
    packing = Packing.from_cu_seqlens(bounds)
    assert packing.runs == ((2, 2), (1, 3), (1, 2))
    assert packing.max_length == 3


def test_a_mask_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    packing = Packing.from_cu_seqlens(torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ConfigError, match="a mask"):
        packed_attention(torch.nn.Identity(), q, q, q, torch.ones(1, 3), packing=packing)


def test_float32_shares_no_heads_outside_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, shared heads in float32 leave only the kernel that keeps every score."""
    seen: list[tuple[int, int, bool]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_: object) -> Tensor:
        seen.append((q.shape[1], k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    packing = attention.Packing(torch.tensor([0, 6]), ((1, 6),), 6)
    for device in ("cpu", "meta"):
        q, k, v = (torch.empty(1, heads, 6, 8, device=device) for heads in (4, 2, 2))
        attention.packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)
    assert seen == [(4, 2, True), (4, 4, False)]
