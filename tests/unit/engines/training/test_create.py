"""Lookup by device and vendor, and what a wrong name or option says."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engines.config.backends import ENGINES
from engines.config.training import TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.base import create_engine
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError, UnknownPluginError
from infra.plugins import PluginTable, Row

TARGET = "engines.training.backends.fsdp.engine:FSDP2Engine"


def create(training: TrainingConfig) -> object:
    return create_engine("language_model", Path("/x"), training, None, 1, CPUPlatform(), 0)


def table(*rows: Row) -> PluginTable[Row]:
    return PluginTable("backend", "training.backend", rows, Row)


def test_a_vendor_of_its_own_wins_over_the_device() -> None:
    of_device = Row(name="b", target=TARGET, devices=("cuda",))
    of_vendor = Row(name="b", target="builtins:dict", devices=("cuda",), vendor="metax")
    engines = table(of_device, of_vendor)
    assert engines.load("b", device="cuda", vendor="nvidia") is FSDP2Engine
    assert engines.load("b", device="cuda", vendor="metax") is dict
    with pytest.raises(UnknownPluginError, match=r"b does not run on npu \(huawei\); "):
        engines.find("b", device="npu", vendor="huawei")
    both = table(of_device, Row(name="b", target="x:Y", devices=("cpu", "cuda")))
    with pytest.raises(ConfigError, match="registered by both"):
        both.find("b", device="cuda")


def test_unknown_backend_and_model_type() -> None:
    with pytest.raises(UnknownPluginError, match=r"no 'fsdp3'.*known: .*; did you mean fsdp\?"):
        create(TrainingConfig(backend="fsdp3"))
    with pytest.raises(UnknownPluginError, match=r"no 'fsdp2.reward_model'; known: none"):
        ENGINES.find("fsdp2.reward_model", device="cpu")
    with pytest.raises(UnknownPluginError, match=r"no 'torchtitan.value_model'; known: .*fsdp2\.v"):
        ENGINES.find("torchtitan.value_model", device="cpu")


def test_a_missing_library_is_named() -> None:
    # `json` stands for a library that is there and lacks what the engine imports.
    engines = table(Row(name="b", target="no_such_lib:E", requires="json", extra="fast"))
    with pytest.raises(ConfigError, match=r"b cannot be loaded .*no_such_lib.*pipeline\[fast\]"):
        engines.load("b", device="cpu")


def test_options_are_checked_by_the_backend() -> None:
    with pytest.raises(ConfigError) as caught:
        create(TrainingConfig(options={"tensor_parallel": 2}))
    assert str(caught.value) == (
        "training.options.tensor_parallel: not an option of fsdp2: no 'tensor_parallel'; known: "
        "cpu_offload, num_prefetched_layers, reshard_after_forward"
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
    assert "mine" in ENGINES.names()
    assert ENGINES.load("mine", device="tpu") is FSDP2Engine
    assert ENGINES.load("mine.value_model", device="tpu") is dict
