"""Adapters against PEFT itself: the same loop on PEFT's own model, and its own merge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from peft import PeftModel
from rlhf.testing.plain_loop import adamw, take_step
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.errors import CheckpointError, EngineError
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.merging import extract_adapter
from engines.training.spec import EngineSpec, ModelType
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

BATCH = TokenBatch.from_sequences(
    [[3, 4, 5, 6, 7], [8, 9, 3], [10, 11, 12]],
    loss_mask=[[0, 0, 1, 1, 1], [0, 1, 1], [0, 1, 1]],
)
NUM_STEPS = 3


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def make_engine(
    path: Path,
    *,
    load: bool = True,
    frozen: bool = False,
    model_type: ModelType = "language_model",
    **training: Any,
) -> FSDP2Engine:
    optimizer = None if frozen else OptimizerConfig(lr=1e-2, weight_decay=0.1)
    engine = FSDP2Engine(
        EngineSpec(
            path, TrainingConfig(**training), optimizer, 10, CPUPlatform(), 0, model_type=model_type
        )
    )
    engine.initialize(load_weights=load)
    return engine


def peft_steps(model: nn.Module) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the same steps on PEFT's own model."""
    optimizer = adamw(model, eps=1e-8)
    steps = []
    lengths = BATCH.lengths_B.tolist()
    for _ in range(NUM_STEPS):
        loss = torch.zeros(())
        for ids, mask in zip(
            BATCH.input_ids_T.split(lengths),
            BATCH.columns["loss_mask"].split(lengths),
            strict=True,
        ):
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = loss + (cross_entropy(logits, ids[1:], reduction="none") * mask[1:]).sum() / 7
        steps.append(take_step(optimizer, loss))
    return steps


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_it_trains_and_merges_as_peft_does(qwen3_dir: Path, tmp_path: Path, use_dora: bool) -> None:
    engine = make_engine(qwen3_dir, lora=LoraConfig(rank=4, alpha=8.0, use_dora=use_dora))
    write_adapter(engine, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    ours = [engine.train_batch(BATCH, sft) for _ in range(NUM_STEPS)]
    for update, (loss, norm) in zip(ours, peft_steps(theirs), strict=True):
        assert update.loss == pytest.approx(loss, abs=1e-5)
        assert update.grad_norm == pytest.approx(norm, rel=1e-4)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in engine.get_per_tensor_param():
        assert torch.allclose(tensor, merged[name], atol=1e-5), name


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_it_comes_out_of_a_checkpoint(qwen3_dir: Path, tmp_path: Path, use_dora: bool) -> None:
    engine = make_engine(qwen3_dir, lora=LoraConfig(rank=4, alpha=8.0, use_dora=use_dora))
    engine.train_batch(BATCH, sft)
    write_adapter(engine, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    for name, tensor in engine.get_per_tensor_param():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name
    extract_adapter(tmp_path / "policy", tmp_path / "half", "bfloat16")
    halves = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}


def test_none_comes_out_of_a_checkpoint_of_all_weights(qwen3_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    make_engine(qwen3_dir).save_checkpoint(tmp_path / "checkpoint", step=1)
    with pytest.raises(CheckpointError, match="holds no adapter: all weights were trained"):
        extract_adapter(tmp_path, tmp_path / "out", "float32")


def test_only_the_named_modules_get_one(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, lora=LoraConfig(rank=2, target_modules=("q_proj",)))
    trained = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".q_proj.lora_" in name for name in trained)
    with pytest.raises(ConfigError, match=r"training.lora.target_modules: got nope; need some of"):
        make_engine(qwen3_dir, lora=LoraConfig(target_modules=("nope",)))


def test_the_first_values_depend_on_the_seed_alone(qwen3_dir: Path) -> None:
    first, second = (make_engine(qwen3_dir, lora=LoraConfig(rank=2)) for _ in range(2))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_another_adapter_cannot_continue_but_can_start(qwen3_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(qwen3_dir, lora=LoraConfig(rank=2))
    engine.train_batch(BATCH, sft)
    engine.save_checkpoint(tmp_path, step=1)
    other = make_engine(qwen3_dir, load=False, lora=LoraConfig(rank=4))
    with pytest.raises(CheckpointError, match=r"trained with training.lora rank 2, alpha 32"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, optimizer=False)
    whole = make_engine(qwen3_dir, load=False, frozen=True)
    whole.load_checkpoint(tmp_path, optimizer=False)
    for started in (other, whole):
        for (name, ours), (_, theirs) in zip(
            started.get_per_tensor_param(), engine.get_per_tensor_param(), strict=True
        ):
            assert torch.allclose(ours, theirs, atol=1e-6), name


def test_an_adapter_of_its_own_right_is_asked_for(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir)
    with pytest.raises(EngineError, match="no adapter to disable"), engine.disable_adapter():
        pass


def test_frozen_parameters_stay(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, frozen_parameters=("model.embed_tokens.*", "*.mlp.*"))
    before = {name: t.clone() for name, t in engine.get_per_tensor_param()}
    engine.train_batch(BATCH, sft)
    same = {name for name, t in engine.get_per_tensor_param() if torch.equal(t, before[name])}
    assert same == {n for n in before if n.startswith("model.embed_tokens.") or ".mlp." in n}
    with pytest.raises(ConfigError, match=r"training.frozen_parameters: 'nope' fits no parameter"):
        make_engine(qwen3_dir, frozen_parameters=("nope",))


def value_loss(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    assert outputs.values_T is not None
    errors_T = (outputs.values_T - 1.0) ** 2
    return LossOutput((errors_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def test_a_value_model_with_one_trains_as_peft_does(qwen3_dir: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    engine = make_engine(qwen3_dir, lora=lora, model_type="value_model")
    write_adapter(engine, tmp_path)
    base = AutoModelForTokenClassification.from_pretrained(
        qwen3_dir, dtype=torch.float32, num_labels=1
    )
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    trained = {name for name, p in theirs.named_parameters() if p.requires_grad}
    assert {"score" in name or "lora_" in name for name in trained} == {True}
    assert any("score" in name for name in trained)
    optimizer = adamw(theirs, eps=1e-8)
    lengths = BATCH.lengths_B.tolist()
    rows = list(
        zip(
            BATCH.input_ids_T.split(lengths),
            BATCH.columns["loss_mask"].split(lengths),
            strict=True,
        )
    )
    for _ in range(NUM_STEPS):
        update = engine.train_batch(BATCH, value_loss)
        loss = torch.zeros(())
        for ids, mask in rows:
            values = theirs(input_ids=ids[None]).logits[0, :-1, 0]
            loss = loss + ((values - 1.0) ** 2 * mask[1:]).sum() / 7
        expected = take_step(optimizer, loss)
        assert update.loss == pytest.approx(expected[0], abs=1e-5)
        assert update.grad_norm == pytest.approx(expected[1], rel=1e-4)
