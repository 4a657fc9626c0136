"""What BaseEngine promises at world size 1; the rest is in tests/contracts/test_backend.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import CheckpointError, EngineError
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

BATCH = TokenBatch.from_sequences(
    [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]],
    loss_mask=[[0, 0, 1, 1, 1], [0, 1], [0, 0, 0]],
)


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def make_engine(path: Path, *, optimizer: OptimizerConfig | None = None, temperature: float = 1.0,
                initialize: bool = True, **training: Any) -> FSDP2Engine:  # fmt: skip
    spec = EngineSpec(
        path, TrainingConfig(**training), optimizer, 10, CPUPlatform(), 0, temperature
    )
    engine = FSDP2Engine(spec)
    if initialize:
        engine.initialize()
    return engine


def test_counts_reach_the_loss_and_the_schedule_moves(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, optimizer=OptimizerConfig(lr=1.0, num_warmup_steps=3))
    seen: list[GlobalCounts] = []

    def spy(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append(counts)
        return sft(outputs, batch, counts)

    rates = [engine.train_batch(BATCH, spy).lr for _ in range(4)]
    assert seen[0] == GlobalCounts(num_tokens=4, num_sequences=2, num_units=2)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert engine.num_steps == 4


def test_metrics_are_summed_and_maxima_are_largest(qwen3_dir: Path) -> None:
    engine = make_engine(
        qwen3_dir, optimizer=OptimizerConfig(lr=1e-9), max_tokens_per_micro_batch=8
    )

    def loss(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        size = torch.tensor(float(batch.num_tokens))
        return LossOutput(sft(outputs, batch, counts).loss, {"tokens": size}, {"largest": size})

    metrics = engine.train_batch(BATCH, loss)
    assert metrics.metrics == {"tokens": 10.0, "largest": 5.0}
    assert metrics.num_tokens == 10


def test_inference_keeps_the_order_and_respects_the_mask(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, max_tokens_per_micro_batch=8)
    everything = engine.infer_batch(TokenBatch(BATCH.input_ids_T, BATCH.cu_seqlens)).logprobs_T
    masked = engine.infer_batch(BATCH).logprobs_T
    on = BATCH.columns["loss_mask"] == 1
    assert torch.allclose(masked[on], everything[on], atol=1e-6)
    assert (masked[~on] == 0).all()
    assert (everything[BATCH.cu_seqlens[:-1].long()] == 0).all()
    assert (everything < 0).sum() == 7


def test_temperature(qwen3_dir: Path) -> None:
    plain, hot = (
        make_engine(qwen3_dir, temperature=t).infer_batch(BATCH.select([0]), Readouts(entropy=True))
        for t in (1.0, 1e6)
    )
    assert hot.logprobs_T[-1].item() == pytest.approx(
        -torch.log(torch.tensor(37.0)).item(), abs=1e-4
    )
    assert plain.entropy_T is not None
    assert hot.entropy_T is not None
    assert plain.entropy_T[-1] < hot.entropy_T[-1]


def test_one_run_is_like_the_other_bit_for_bit(qwen3_dir: Path) -> None:
    def run() -> dict[str, torch.Tensor]:
        engine = make_engine(qwen3_dir, optimizer=OptimizerConfig(lr=1e-2))
        for _ in range(3):
            engine.train_batch(BATCH, sft)
        return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}

    first, second = run(), run()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scopes_offload_once_and_do_not_nest_the_wrong_way(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        qwen3_dir, optimizer=OptimizerConfig(), param_offload=True, optimizer_offload=True
    )
    moves: list[tuple[str, bool, bool, bool]] = []
    monkeypatch.setattr(
        engine, "to",
        lambda device, model=True, optimizer=True, grad=True: moves.append(
            (str(device), model, optimizer, grad)
        ),
    )  # fmt: skip
    with engine.train_mode(), engine.eval_mode(), engine.train_mode():
        assert moves == [("cpu", True, False, True)]
    assert moves == [("cpu", True, False, True)] * 2
    moves.clear()
    with engine.eval_mode():
        assert moves == [("cpu", True, False, False)], "inference wants no gradients"
        with pytest.raises(EngineError, match="leave_device inside eval_mode"):
            engine.leave_device()
    moves.clear()
    engine.leave_device()
    assert moves == [("cpu", True, False, True), ("cpu", False, True, False)]
    with engine.eval_mode(), pytest.raises(EngineError, match="leave eval_mode first"):
        engine.train_mode().__enter__()


def test_what_cannot_be_done_says_so(qwen3_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"call initialize\(\) first"):
        _ = make_engine(qwen3_dir, initialize=False).model
    reference = make_engine(qwen3_dir)
    with pytest.raises(EngineError, match="without an optimizer"):
        reference.train_batch(BATCH, sft)
    with pytest.raises(EngineError, match="no adapter"), reference.disable_adapter():
        pass
    engine = make_engine(qwen3_dir, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=8)
    with pytest.raises(ConfigError, match=r"training.max_tokens_per_micro_batch: got 8; need at"):
        engine.train_batch(TokenBatch.from_sequences([[3] * 9], loss_mask=[[0, *[1] * 8]]), sft)
    with pytest.raises(EngineError, match="a rank has no sequence"):
        engine.train_batch(BATCH.select([]), sft)
    with pytest.raises(EngineError, match="a sequence has no token"):
        engine.infer_batch(TokenBatch.from_sequences([[3, 4], []]))
    unpredicted = TokenBatch.from_sequences([[3, 4], [5], [6, 7]], loss_mask=[[0, 1], [0], [1, 1]])
    for call in (
        lambda: engine.train_batch(unpredicted, sft),
        lambda: engine.infer_batch(unpredicted),
    ):
        with pytest.raises(
            EngineError, match="sequence 2 of data-parallel rank 0 trains on its first"
        ):
            call()
    with pytest.raises(EngineError, match="loss_mask is 0 everywhere"):
        engine.train_batch(TokenBatch(BATCH.input_ids_T, BATCH.cu_seqlens), sft)
    with pytest.raises(CheckpointError, match="no engine.json"):
        engine.load_checkpoint(tmp_path)


def test_norms_are_not_decayed(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, optimizer=OptimizerConfig(lr=0.5, weight_decay=1.0))
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}

    def no_gradient(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        return LossOutput(outputs.logprobs_T.sum() * 0.0)

    engine.train_batch(BATCH, no_gradient)
    for name, tensor in engine.get_per_tensor_param():
        factor = 1.0 if before[name].dim() == 1 else 0.5
        assert torch.allclose(tensor, before[name] * factor)
