"""The table of training backends, the layouts it refuses, and the matrix printed from it."""

import importlib
import importlib.util

import pytest

from engines.config.backends import BACKENDS
from engines.config.training import TrainingConfig, check_layout
from infra.errors import ConfigError


@pytest.mark.parametrize("name", BACKENDS)
def test_every_target_is_there(name: str) -> None:
    backend = BACKENDS[name]
    for target in backend.targets.values():
        module, _, attribute = target.partition(":")
        if backend.requires and importlib.util.find_spec(backend.requires) is None:
            assert importlib.util.find_spec(module) is not None
        else:
            assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"pipeline_parallel_size": 2},
            "training.pipeline_parallel_size: got 2; fsdp2 has no pipeline parallelism; set it to "
            "1, or training.backend to megatron",
        ),
        (
            {"backend": "torchtitan", "lora": {"rank": 4}},
            "training.lora: torchtitan has no lora; remove it, or set training.backend to fsdp or ",
        ),
        (
            {"backend": "megatron", "use_torch_compile": True},
            "training.use_torch_compile: megatron has no compile; remove it, or set "
            "training.backend to fsdp or fsdp2",
        ),
        (
            {"backend": "megatron", "ulysses_size": 2},
            "training.ulysses_size: got 2; megatron has no ulysses parallelism; set it to 1, or ",
        ),
        (
            {"backend": "automodel", "tensor_parallel_size": 2, "lora": {"rank": 4}},
            "training.lora: automodel has no lora together with tensor; leave one of them out, ",
        ),
    ],
)
def test_what_a_backend_has_not_is_refused(settings: dict, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(TrainingConfig.model_validate(settings))
    assert str(caught.value).startswith(line)


def test_a_backend_of_another_distribution_is_not_judged() -> None:
    check_layout(TrainingConfig(backend="mine", tensor_parallel_size=2))


def test_ranks_are_as_many_as_the_layout_needs() -> None:
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert TrainingConfig.model_validate(layout).num_workers == 6
    config = TrainingConfig.model_validate({**layout, "num_workers": 12})
    assert config.data_parallel_size == 2
    with pytest.raises(ValueError, match=r"got 8; need a multiple of 6 .*; use 6"):
        TrainingConfig.model_validate({**layout, "num_workers": 8})


def test_unit_exceeding_token_budget_is_refused_with_user_value() -> None:
    alone = TrainingConfig(max_tokens_per_micro_batch=16)
    alone.check_unit(16, "a pair")
    with pytest.raises(ConfigError, match=r"got 16; need 17, for 17 tokens of a pair, which"):
        alone.check_unit(17, "a pair")
    shared = TrainingConfig(max_tokens_per_micro_batch=16, ulysses_size=2)
    shared.check_unit(32, "a pair")
    with pytest.raises(ConfigError, match=r"got 16 on each of 2 ranks .* need 18, for 35 tokens"):
        shared.check_unit(35, "a pair")
