"""Lookup by device and vendor, and what a wrong name or option says."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engines.config.training import TrainingConfig
from engines.errors import UnknownPluginError
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.registry import EngineRegistry, built_in_registry, create_engine
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

TARGET = "engines.training.backends.fsdp.engine:FSDP2Engine"


def create(training: TrainingConfig) -> object:
    return create_engine("language_model", Path("/x"), training, None, 1, CPUPlatform(), 0)


def test_a_vendor_of_its_own_wins_over_the_device() -> None:
    registry = EngineRegistry()
    register = {"model_type": "language_model", "backend": "b"}
    registry.register(**register, target=TARGET, device="cuda")
    registry.register(**register, target="builtins:dict", device="cuda", vendor="metax")
    lookup = {**register, "device": "cuda"}
    assert registry.lookup(**lookup, vendor="nvidia") is FSDP2Engine
    assert registry.lookup(**lookup, vendor="metax") is dict
    with pytest.raises(UnknownPluginError, match=r"b has no language_model on npu \(huawei\)"):
        registry.lookup(**register, device="npu", vendor="huawei")
    with pytest.raises(ConfigError, match="registered by both"):
        registry.register(**register, target="x:Y", device=["cpu", "cuda"])


def test_unknown_backend_and_model_type() -> None:
    with pytest.raises(UnknownPluginError, match=r"no 'fsdp3'.*known: .*; did you mean fsdp\?"):
        create(TrainingConfig(backend="fsdp3"))
    with pytest.raises(UnknownPluginError, match=r"\(for a reward_model\)"):
        built_in_registry().lookup(model_type="reward_model", backend="fsdp2", device="cpu")


def test_a_missing_library_is_named() -> None:
    registry = EngineRegistry()
    registry.register(
        model_type="language_model", backend="b", target="no_such_lib:E", device="cpu"
    )
    with pytest.raises(ConfigError, match="b cannot be imported .*no_such_lib"):
        registry.lookup(model_type="language_model", backend="b", device="cpu")


def test_options_are_checked_by_the_backend() -> None:
    with pytest.raises(ConfigError) as caught:
        create(TrainingConfig(options={"tensor_parallel": 2}))
    assert str(caught.value) == (
        "training.options.tensor_parallel: not an option of fsdp2; it has: reshard_after_forward, "
        "num_prefetched_layers, cpu_offload"
    )
    with pytest.raises(ConfigError, match=r"training.options.reshard_after_forward: got 'maybe'"):
        create(TrainingConfig(options={"reshard_after_forward": "maybe"}))


def test_the_environment_picks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ENGINE_DEVICE", "npu")
    with pytest.raises(UnknownPluginError, match="on npu"):
        create(TrainingConfig())


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("backend.mine", TARGET, "rlhf.plugins"),
        EntryPoint("backend.mine.value_model", "builtins:dict", "rlhf.plugins"),
        EntryPoint("reward.mine", "x:y", "rlhf.plugins"),
    ]
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: entries)
    registry = built_in_registry()
    assert "mine" in registry.names("language_model")
    lookup = {"backend": "mine", "device": "tpu"}
    assert registry.lookup(model_type="language_model", **lookup) is FSDP2Engine
    assert registry.lookup(model_type="value_model", **lookup) is dict
