"""Bytes of training ranks against sums worked by hand, and against what autograd saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cost_inputs import A3B, B8, B32, shape_of, training_of, work_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.testing import memory_formulas
from transformers import AutoConfig, AutoModelForCausalLM

from engines.config.training import LoraConfig, TrainingConfig
from engines.cost.model_shape import ModelShape
from engines.cost.rank_bytes import (
    host_bytes,
    num_micro_batch_tokens,
    resting_bytes,
    role_bytes,
    saved_bytes,
    state_bytes,
    sync_bytes,
    train_bytes,
)
from engines.cost.workload import RoleCost

GB = 1e9
FLOAT32 = TrainingConfig().on(accelerator=False)
KINDS: list[tuple[str, dict[str, Any], float]] = [
    ("llama", {}, 0.02),
    ("qwen3", {"head_dim": 32}, 0.02),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 0.15),
]


@pytest.mark.parametrize(("model", "gigabytes"), [(B8, 16.4), (A3B, 61.1), (B32, 65.5)])
def test_training_state_over_eight_ranks(model: str, gigabytes: float) -> None:
    # 16 bytes of each weight: float32 weight, gradient and two moments.
    work = work_of(shape_of(model), training_of(num_workers=8))
    assert state_bytes(work) / GB == pytest.approx(gigabytes, abs=0.05)
    held = role_bytes(work.roles[0], work.training)
    assert (held.gradients, held.moments) == (held.parameters, 2 * held.parameters)


def test_copies_and_moving_averages() -> None:
    shape, training = shape_of(B8), training_of(num_workers=8, replicate_size=2)
    role = RoleCost("policy", shape, num_trained=1, keeps_average=True)
    held = role_bytes(role, training)
    quarter = shape.num_parameters / 4
    assert held.parameters == pytest.approx(4 * quarter, abs=1)
    assert held.moments == pytest.approx(12 * quarter, abs=1)


def test_one_rank_in_float32_has_no_buckets() -> None:
    role = RoleCost("policy", shape_of(), num_trained=1)
    assert role_bytes(role, FLOAT32).gathered == 0
    assert role_bytes(role, training_of()).gathered > 0


def test_frozen_models_are_bfloat16_but_on_a_cpu() -> None:
    shape, training = shape_of(B8), training_of(num_workers=8)
    frozen = RoleCost("reference", shape, num_passes=1)
    assert role_bytes(frozen, training).parameters == shape.num_parameters * 2 // 8
    on_cpu = role_bytes(frozen, training, on_cpu=True)
    assert on_cpu.parameters == shape.num_parameters * 4 // 8
    assert (on_cpu.gradients, on_cpu.moments) == (0, 0)


def test_an_adapter_trains_a_frozen_base() -> None:
    shape, lora = shape_of(B8), LoraConfig(rank=16)
    work = work_of(shape, training_of(num_workers=8, lora=lora))
    adapter = shape.adapter_parameters(lora)
    whole = (2 * shape.num_parameters + 16 * adapter) / 8
    assert state_bytes(work) == pytest.approx(whole, rel=1e-6)


def test_buckets_of_a_layer() -> None:
    shape = shape_of(B8)
    held = role_bytes(RoleCost("policy", shape, num_trained=1), training_of(num_workers=8))
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    root = 2 * 151936 * 4096 + 4096
    assert held.gathered == 2 * (root + 2 * layer)
    assert held.reduced == 2 * (root + layer) + 2 * 4 * layer
    kept = training_of(num_workers=8, options={"reshard_after_forward": False})
    whole = role_bytes(RoleCost("policy", shape, num_trained=1), kept)
    assert whole.gathered == 2 * shape.num_parameters


def test_offloaded_moments_return_for_the_step() -> None:
    shape = shape_of(B8)
    work = work_of(shape, training_of(num_workers=8, optimizer_offload=True))
    found = train_bytes(work)
    assert found.moment_bytes == 0  # saved tensors weigh more than the moments
    assert found.saved_bytes > shape.num_parameters
    # In parts, unless there is an average, or Megatron-Core's optimizer.
    weights = 4 * shape.num_parameters // 8
    assert state_bytes(work) == pytest.approx(2 * weights + 3 * 2**28, abs=8)
    averaged = replace(work.roles[0], keeps_average=True)
    assert state_bytes(replace(work, roles=(averaged,))) == pytest.approx(5 * weights, abs=8)
    whole = training_of(num_workers=8, optimizer_offload=True, backend="megatron")
    short = replace(work, num_sequences=1, sequence_tokens=8, training=whole)
    step = train_bytes(short)
    assert (step.saved_bytes, step.bucket_bytes) == (0, 0)
    held = role_bytes(work.roles[0], whole)
    assert step.moment_bytes == held.moments
    assert step.total_bytes == state_bytes(short)


def test_idle_models_stay_or_leave() -> None:
    shape, critic = shape_of(B8), shape_of(B8, values=True)
    second = RoleCost("critic", critic, num_trained=1)
    here = work_of(shape, training_of(num_workers=8), second)
    away = replace(here, training=training_of(num_workers=8, param_offload=True))
    eighth = shape.num_parameters / 8
    alone = train_bytes(replace(here, roles=here.roles[:1]))
    assert train_bytes(here).total_bytes - alone.total_bytes == pytest.approx(12 * eighth, rel=0.1)
    assert train_bytes(away).parameter_bytes == alone.parameter_bytes
    assert resting_bytes(here).parameter_bytes == pytest.approx(8 * eighth, rel=0.1)
    assert resting_bytes(away).parameter_bytes == 0
    both = training_of(num_workers=8, param_offload=True, optimizer_offload=True)
    assert resting_bytes(replace(here, training=both)).total_bytes == 0
    in_host = host_bytes(replace(here, training=both), 8)
    assert in_host == pytest.approx(12 * (shape.num_parameters + critic.num_parameters), rel=1e-6)


def test_a_sync_holds_weights_and_a_tensor() -> None:
    shape = shape_of(B8)
    work = work_of(shape, training_of(num_workers=8, optimizer_offload=True))
    found = sync_bytes(work)
    assert found.parameter_bytes == shape.num_parameters * 4 // 8
    # Gathered in float32, and on its way in bfloat16: it is larger than a bucket.
    assert found.bucket_bytes == (4 + 2) * 151936 * 4096 + 2 * 256 * 2**20
    assert found.gradient_bytes == found.moment_bytes == 0


def test_megatron_holds_its_part_of_each_layer() -> None:
    shape = shape_of(A3B)
    training = training_of(
        backend="megatron", num_workers=16, tensor_parallel_size=2, pipeline_parallel_size=2,
        expert_parallel_size=4,
    )  # fmt: skip
    held = role_bytes(RoleCost("policy", shape, num_trained=1), training)
    experts = shape.num_expert_parameters / (2 * 4)
    layers = shape.num_parameters - shape.num_expert_parameters - shape.root_parameters
    dense = (layers / 2 + shape.embedding_parameters) / 2
    # Four ranks share the main weights of a dense part, two those of an expert.
    share = dense / 4 + experts / 2
    assert held.gradients == pytest.approx(4 * (dense + experts), abs=1)
    assert held.moments == pytest.approx(8 * share, abs=1)
    assert held.parameters == pytest.approx(2 * (dense + experts) + 4 * share, abs=1)


def test_micro_batches_hold_what_there_is() -> None:
    work = work_of(shape_of(), training_of(num_workers=8, max_tokens_per_micro_batch=4096))
    assert num_micro_batch_tokens(work) == 4096
    assert num_micro_batch_tokens(replace(work, num_sequences=16)) == 2048
    assert num_micro_batch_tokens(replace(work, num_sequences=16, num_updates=2)) == 1024


def test_saved_tensors_by_setting() -> None:
    shape, tokens = shape_of(B8), 1000
    whole = saved_bytes(shape, training_of(), tokens)
    again = saved_bytes(shape, training_of(gradient_checkpointing=True), tokens)
    # Half a norm in float32, its two results, queries to values, four inner products.
    layer = 2 * 8 * 4096 + 6 * 5120 + 2 * 10240 + 8 * 12288
    assert whole == pytest.approx(tokens * (36 * layer + 8 * 4096), rel=0.01)
    assert again == pytest.approx(tokens * (36 * 2 * 4096 + layer), rel=0.01)
    offloaded = saved_bytes(shape, training_of(activation_offload=True), tokens)
    assert offloaded == pytest.approx(tokens * layer, rel=0.01)
    logits = saved_bytes(shape, training_of(chunked_logprobs=False), tokens)
    assert logits - whole == tokens * 151936 * 10
    compiled = saved_bytes(shape, training_of(use_torch_compile=True), tokens)
    assert compiled < 0.8 * whole
    megatron = saved_bytes(shape, training_of(backend="megatron"), tokens)
    assert megatron - whole == tokens * 36 * 2 * (12288 + 4096 + 4 * 128)
    shared = training_of(tensor_parallel_size=2, backend="megatron")
    assert saved_bytes(shape, shared, tokens) == pytest.approx(megatron / 2, rel=0.05)


@pytest.mark.parametrize(("kind", "more", "within"), KINDS)
def test_saved_tensors_of_autograd(kind: str, more: dict[str, Any], within: float) -> None:
    config = AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=192, vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    num_tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(torch.randint(3, 100, (1, num_tokens)), use_cache=False)[0]
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del hidden
    shape = ModelShape.from_config(config.to_dict())
    expected = saved_bytes(shape, FLOAT32, num_tokens)
    assert expected == pytest.approx(counted, rel=within)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
@pytest.mark.parametrize("recompute", [False, True])
def test_plan_agrees_with_what_the_audit_counts(backend: str, recompute: bool) -> None:
    """The formulas are those that the audit's own tests confirm on running engines."""
    size = memory_formulas.Shape(width=256, inner=768, heads=4, kv_heads=2, head_dim=64)
    config = AutoConfig.for_model("qwen3", **size.config).to_dict()
    kept = memory_formulas.saved_bytes(
        size, backend, tokens=512, predicted=510, recompute=recompute
    )
    training = training_of(backend=backend, dtype="float32", gradient_checkpointing=recompute)
    planned = saved_bytes(ModelShape.from_config(config), training, 512)
    assert 0.97 * kept < planned < 1.08 * kept


SIZES = st.sampled_from([1, 2, 4, 8, 16])


@settings(deadline=None, max_examples=60)
@given(
    ranks=SIZES, tokens=st.integers(64, 40_000), more=st.integers(0, 40_000),
    recompute=st.booleans(), offload=st.booleans(), lora=st.booleans(),
    model=st.sampled_from(["", B8, A3B]),
)  # fmt: skip
def test_need_grows_with_tokens_and_falls_with_ranks(
    ranks: int, tokens: int, more: int, recompute: bool, offload: bool, lora: bool, model: str
) -> None:
    def need(num_workers: int, num_tokens: int) -> int:
        training = training_of(
            num_workers=num_workers, max_tokens_per_micro_batch=num_tokens,
            gradient_checkpointing=recompute, optimizer_offload=offload,
            lora=LoraConfig() if lora else None,
        )  # fmt: skip
        return train_bytes(work_of(shape_of(model), training)).total_bytes

    assert need(ranks, tokens) <= need(ranks, tokens + more)
    assert need(2 * ranks, tokens) <= need(ranks, tokens)
