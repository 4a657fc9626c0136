"""Layouts that are refused before anything is built, and the arithmetic of one."""

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from engines.config.training import TrainingConfig
from engines.training.backends.megatron.layout import Layout, check_layout
from infra.errors import ConfigError


def config(**changed: Any) -> PretrainedConfig:
    shape = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 96, "hidden_size": 64,
    }  # fmt: skip
    return AutoConfig.for_model(**{"model_type": "qwen3", **shape, **changed})


@pytest.mark.parametrize(
    ("layout", "world_size", "setting"),
    [
        (Layout(tensor=2), 3, "num_workers"),
        (Layout(tensor=8, sequence_parallel=True), 8, "tensor_parallel_size"),
        (Layout(tensor=5), 5, "tensor_parallel_size"),
        (Layout(pipeline=3), 3, "pipeline_parallel_size"),
        (Layout(pipeline=2, virtual=3), 2, "virtual_pipeline_parallel_size"),
        (Layout(virtual=2), 1, "virtual_pipeline_parallel_size"),
        (Layout(context=16), 16, "context_parallel_size"),
        (Layout(tensor=4, context=4), 16, "context_parallel_size"),
        (Layout(expert=2), 2, "expert_parallel_size"),
        (Layout(expert=2), 3, "expert_parallel_size"),
    ],
)
def test_refused(layout: Layout, world_size: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"training.{setting}:"):
        check_layout(layout, config(), world_size)


def test_a_mixture_needs_cut_activations() -> None:
    mixture = config(model_type="qwen3_moe", num_experts=4)
    check_layout(Layout(tensor=2, expert=4, sequence_parallel=True), mixture, 4)
    with pytest.raises(ConfigError, match="training.sequence_parallel: got false"):
        check_layout(Layout(tensor=2), mixture, 2)
    with pytest.raises(ConfigError, match="divisor of the model's 4 experts"):
        check_layout(Layout(expert=3), mixture, 3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=4, sequence_parallel=True),
        Layout(pipeline=2, virtual=2),
        Layout(context=8),
        Layout(tensor=2, pipeline=2, context=2),
    ],
)
def test_accepted(layout: Layout) -> None:
    check_layout(layout, config(), 16)


def test_from_the_configuration() -> None:
    training = TrainingConfig(
        num_workers=8, tensor_parallel_size=2, pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=3, context_parallel_size=2, expert_parallel_size=2,
    )  # fmt: skip
    layout = Layout.from_config(training)
    assert layout == Layout(2, 2, 3, 2, 2, sequence_parallel=True)
    assert (layout.num_chunks, layout.tokens_multiple) == (6, 2)
    assert [layout.padded_vocabulary(n) for n in (36, 37)] == [36, 38]
    assert not Layout.from_config(TrainingConfig()).sequence_parallel
