"""`auto` of dtype and recomputation: by kind of device, before anything is fingerprinted."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from engines.config.recipe import Recipe
from engines.config.stages.supervised import SFTStageConfig
from engines.config.training import HardwareConfig, OptimizerConfig, TrainingConfig
from engines.controller.model_worker import WorkerSpec
from engines.training.spec import POLICY, EngineSpec, ModelSource, RoleSpec
from flows import preflight
from flows.recipe.recipe import load_recipe
from hardware.cpu import CPUPlatform
from hardware.nvidia import NvidiaPlatform
from tasks.runner.memory_knobs import memory_knobs

RESOLVED = {False: ("float32", False), True: ("bfloat16", True)}


def chosen(training: TrainingConfig) -> tuple[str, bool | str]:
    return training.dtype, training.gradient_checkpointing


@pytest.mark.parametrize("accelerator", [False, True])
def test_auto_is_by_kind_of_device_and_a_choice_stays(accelerator: bool) -> None:
    assert chosen(TrainingConfig()) == ("auto", "auto")
    resolved = TrainingConfig().on(accelerator=accelerator)
    assert chosen(resolved) == RESOLVED[accelerator]
    assert resolved.on(accelerator=not accelerator) is resolved
    for dtype in ("float32", "bfloat16"):
        for recomputes in (False, True):
            given = TrainingConfig(dtype=dtype, gradient_checkpointing=recomputes)
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
    assert chosen(found.training) == RESOLVED[name == "nvidia"]
    assert hardware.is_accelerator is (name == "nvidia")


def test_a_cpus_identity_is_that_of_explicit_settings() -> None:
    explicit = TrainingConfig(dtype="float32", gradient_checkpointing=False)
    found = TrainingConfig().on(accelerator=False)
    assert json.dumps(found.identity_values()) == json.dumps(explicit.identity_values())
    other = TrainingConfig().on(accelerator=True)
    assert {change.field for change in other.changes(found)} == {
        "dtype", "gradient_checkpointing",
    }  # fmt: skip


def test_an_engine_and_its_replicas_see_no_auto(tmp_path: Path) -> None:
    training, optimizer = TrainingConfig(), OptimizerConfig()
    for platform in (CPUPlatform(), NvidiaPlatform()):
        spec = EngineSpec(tmp_path, training, optimizer, 1, platform, 0)
        assert chosen(spec.training) == RESOLVED[platform.is_accelerator]
        roles = {POLICY: RoleSpec(ModelSource(tmp_path), training, optimizer, 1)}
        workers = WorkerSpec(roles, tmp_path, None, 1.0, platform.vendor_name, 0)
        assert chosen(workers.training) == RESOLVED[platform.is_accelerator]


def test_recomputation_is_proposed_unless_it_is_on() -> None:
    recipe: Recipe = load_recipe("quickstart", [])
    for setting, proposed in (("auto", True), (False, True), (True, False)):
        training = TrainingConfig(gradient_checkpointing=setting)
        config = SFTStageConfig.from_recipe(recipe.model_copy(update={"training": training}))
        assert ("training.gradient_checkpointing: true" in memory_knobs(config)) is proposed
