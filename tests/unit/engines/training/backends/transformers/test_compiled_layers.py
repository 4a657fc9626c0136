"""Compiled layers: few graphs for packed rows of any length, with the numbers of plain layers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import varlen_on_cpu  # noqa: F401  registers its kernels
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, PreTrainedModel
from vision_cases import write_vision_model

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.transformers.build import (
    compile_layers,
    decoder_layers,
    language_model_prefix,
)
from engines.training.model import attention
from engines.training.model.attention import ATTENTION_NAME, Packing, register_packed_attention
from engines.training.spec import EngineSpec
from hardware.cpu import CPUPlatform

LENGTHS = ((5, 9), (12,), (7, 7, 7), (3, 20, 4, 6), (40, 2), (11, 13, 1))


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    """Without the graphs of other tests, and with a limit for them as if one less were left."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention calls the operator that it calls on a GPU."""
    varlen: Any = vars(attention)["_varlen"]
    monkeypatch.setattr(attention, "_batched_runs", varlen)


def model_of(path: Path, **config: Any) -> PreTrainedModel:
    register_packed_attention()
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION_NAME, **config)


def loss_of(model: PreTrainedModel, lengths: tuple[int, ...]) -> Tensor:
    """Mean of the squared logits of a packed row."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids = torch.arange(sum(lengths)).remainder(31) + 3
    positions = torch.cat([torch.arange(n) for n in lengths])
    logits = model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_mask=None,
        packing=Packing.from_cu_seqlens(bounds),
    ).logits  # fmt: skip
    return (logits**2).mean()


def trained(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = loss_of(model, lengths)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_of_any_length_and_all_layers_share_a_graph(qwen3_dir: Path) -> None:
    plain, compiled, counter = model_of(qwen3_dir), model_of(qwen3_dir), _counter("eager")
    compile_layers(decoder_layers(compiled), counter)
    for lengths in LENGTHS:
        found, expected = trained(compiled, lengths), trained(plain, lengths)
        assert counter.frame_count == 1, "one graph of the whole layer, with its attention"
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        for lengths in LENGTHS:
            torch.testing.assert_close(loss_of(compiled, lengths), loss_of(plain, lengths))
    assert counter.frame_count == 2, "and one without gradients"


@pytest.mark.slow
def test_attention_outside_of_graphs_adds_none_per_length(qwen3_dir: Path) -> None:
    """As in float32, where attention is a call per run of equal lengths."""
    compiled, plain, counter = model_of(qwen3_dir), model_of(qwen3_dir), _counter("eager")
    compile_layers(decoder_layers(compiled), counter)
    counts: list[int] = []
    for lengths in LENGTHS:
        torch.testing.assert_close(trained(compiled, lengths), trained(plain, lengths))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1]
    assert counts[-1] <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_models_of_a_class_are_all_compiled(make_model: Callable[..., Path]) -> None:
    """Torch gives up on a function with more variants than its limit, without an error."""
    counter = _counter("eager")
    for size in (1, 2, 3):
        model = model_of(make_model("qwen3", intermediate_size=16 * size, num_hidden_layers=1))
        compile_layers(decoder_layers(model), counter)
        with torch.no_grad():
            loss_of(model, LENGTHS[0])
    assert counter.frame_count == 3


@pytest.mark.parametrize("use_torch_compile", [True, False, "auto"])
def test_an_engine_compiles_what_is_chosen(qwen3_dir: Path, use_torch_compile: Any) -> None:
    training = TrainingConfig(
        use_torch_compile=use_torch_compile, torch_compile_backend="aot_eager"
    )
    engine = FSDP2Engine(EngineSpec(qwen3_dir, training, OptimizerConfig(), 1, CPUPlatform(), 0))
    engine.initialize()
    layers = decoder_layers(engine.model)
    assert layers
    assert {_is_compiled(layer) for layer in layers} == {use_torch_compile is True}


def test_a_vision_tower_is_not_compiled(tmp_path: Path) -> None:
    """Its layers cut their input into images: each number of them would be a graph."""
    training = TrainingConfig(use_torch_compile=True)
    path = write_vision_model(tmp_path)
    engine = FSDP2Engine(EngineSpec(path, training, OptimizerConfig(), 1, CPUPlatform(), 0))
    engine.initialize()
    inside = language_model_prefix(engine.model)
    decoder, layers = decoder_layers(engine.model, inside), decoder_layers(engine.model)
    assert 0 < len(decoder) < len(layers)
    assert [_is_compiled(layer) for layer in layers] == [layer in decoder for layer in layers]


def _is_compiled(layer: Any) -> bool:
    return hasattr(layer.forward, "_torchdynamo_orig_callable")


def _counter(backend: str) -> Any:
    return CompileCounterWithBackend(backend)
