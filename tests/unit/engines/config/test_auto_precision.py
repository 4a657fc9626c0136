"""`auto` of `training`: by kind of device, before anything is fingerprinted."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.recipe import Recipe
from engines.config.stages.supervised import SFTStageConfig
from engines.config.training import (
    HardwareConfig,
    LoraConfig,
    OptimizerConfig,
    TrainingConfig,
    check_layout,
)
from engines.controller.model_worker import WorkerSpec
from engines.training.spec import POLICY, EngineSpec, ModelSource, RoleSpec
from flows import machine_survey, preflight
from flows.recipe.recipe import load_recipe
from hardware.cpu import CPUPlatform
from hardware.nvidia import NvidiaPlatform
from infra.survey_report import FoundPlatform
from tasks.runner.memory_knobs import memory_knobs

RESOLVED = {False: ("float32", False, False), True: ("bfloat16", True, True)}


def chosen(training: TrainingConfig) -> tuple[str, bool | str, bool | str]:
    return training.dtype, training.gradient_checkpointing, training.use_torch_compile


@pytest.mark.parametrize("accelerator", [False, True])
def test_auto_is_by_kind_of_device_and_a_choice_stays(accelerator: bool) -> None:
    assert chosen(TrainingConfig()) == ("auto", "auto", "auto")
    resolved = TrainingConfig().on(accelerator=accelerator)
    assert chosen(resolved) == RESOLVED[accelerator]
    assert resolved.on(accelerator=not accelerator) is resolved
    for dtype in ("float32", "bfloat16"):
        for recomputes in (False, True):
            given = TrainingConfig(
                dtype=dtype, gradient_checkpointing=recomputes, use_torch_compile=not recomputes
            )
            assert given.on(accelerator=accelerator) is given
    with pytest.raises(ValidationError, match="gradient_checkpointing"):
        TrainingConfig.model_validate({"gradient_checkpointing": "maybe"})


@pytest.mark.parametrize("name", ["cpu", "nvidia"])
def test_preflight_resolves_before_stages_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    hardware = HardwareConfig(platform=name, device_kind="X 1")
    monkeypatch.setattr(preflight, "_check_parts", lambda recipe: None)
    monkeypatch.setattr(preflight, "request_of", lambda recipe: None)
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    recipe = load_recipe("quickstart", [f"location.home={tmp_path}"])
    recipe = recipe.model_copy(update={"hardware": hardware, "training": TrainingConfig()})
    found = preflight.preflight(recipe)
    # The machine that is meant may have no compiler.
    assert chosen(found.training) == (*RESOLVED[name == "nvidia"][:2], False)
    assert hardware.is_accelerator is (name == "nvidia")


@pytest.mark.parametrize(
    ("memory_bytes", "has_compiler", "expected"),
    [
        (80 * 10**9, True, ("bfloat16", False, True)),
        (80 * 10**9, False, ("bfloat16", False, False)),
        (10**9, True, ("bfloat16", True, True)),
        (None, True, ("bfloat16", True, True)),
    ],
    ids=["room", "no compiler", "no room", "unknown memory"],
)
def test_this_machines_devices_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory_bytes: int | None, has_compiler: bool,
    expected: tuple[str, bool, bool],
) -> None:  # fmt: skip
    found = FoundPlatform(
        name="nvidia", device="cuda", reason="here", label="NVIDIA H100", num_devices=1,
        memory_bytes=memory_bytes, has_compiler=has_compiler,
    )  # fmt: skip
    for module in (machine_survey, preflight):
        monkeypatch.setattr(module, "surveyed", lambda *_: found)
    monkeypatch.setattr(preflight, "_check_parts", lambda recipe: None)
    monkeypatch.setattr(preflight, "_trains", lambda *_: False)
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    recipe = load_recipe("quickstart", [f"location.home={tmp_path}"])
    recipe = recipe.model_copy(update={"training": TrainingConfig()})
    assert chosen(preflight.preflight(recipe).training) == expected
    training = TrainingConfig(gradient_checkpointing=True, use_torch_compile=True)
    asked = recipe.model_copy(update={"training": training})
    assert chosen(preflight.preflight(asked).training) == ("bfloat16", True, True)


def test_a_cpus_identity_is_that_of_explicit_settings() -> None:
    explicit = TrainingConfig(
        dtype="float32", gradient_checkpointing=False, use_torch_compile=False
    )
    found = TrainingConfig().on(accelerator=False)
    assert json.dumps(found.identity_values()) == json.dumps(explicit.identity_values())
    other = TrainingConfig().on(accelerator=True)
    assert {change.field for change in other.changes(found)} == {
        "dtype", "gradient_checkpointing", "use_torch_compile",
    }  # fmt: skip


COMPILED: dict[str, tuple[dict[str, Any], bool]] = {
    "fsdp2": ({}, True),
    "fsdp with an adapter": ({"backend": "fsdp", "lora": LoraConfig()}, True),
    "magnitudes": ({"lora": LoraConfig(use_dora=True)}, False),
    "megatron": ({"backend": "megatron"}, False),
    "a backend of others": ({"backend": "mine"}, False),
}


@pytest.mark.parametrize(("settings", "compiled"), COMPILED.values(), ids=COMPILED)
def test_layers_are_compiled_where_that_works(settings: Any, compiled: bool) -> None:
    training = TrainingConfig(**settings)
    check_layout(training)  # `auto` asks for nothing
    assert (training.compile_hindrance is None) is compiled
    found = training.on(accelerator=True)
    assert (found.use_torch_compile, found.compiles_layers) == (compiled, compiled)
    assert training.on(accelerator=True, has_compiler=False).use_torch_compile is False
    assert not training.compiles_layers


def test_an_engine_and_its_replicas_see_no_auto(tmp_path: Path) -> None:
    training, optimizer = TrainingConfig(), OptimizerConfig()
    for platform in (CPUPlatform(), NvidiaPlatform()):
        spec = EngineSpec(tmp_path, training, optimizer, 1, platform, 0)
        # An engine alone does not know if there is a compiler.
        assert chosen(spec.training) == (*RESOLVED[platform.is_accelerator][:2], False)
        roles = {POLICY: RoleSpec(ModelSource(tmp_path), training, optimizer, 1)}
        workers = WorkerSpec(roles, tmp_path, None, 1.0, platform.vendor_name, 0)
        assert chosen(workers.training) == chosen(spec.training)


def test_recomputation_is_proposed_unless_it_is_on() -> None:
    recipe: Recipe = load_recipe("quickstart", [])
    for setting, proposed in (("auto", True), (False, True), (True, False)):
        training = TrainingConfig(gradient_checkpointing=setting)
        config = SFTStageConfig.from_recipe(recipe.model_copy(update={"training": training}))
        assert ("training.gradient_checkpointing: true" in memory_knobs(config)) is proposed
