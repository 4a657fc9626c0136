"""Engines of other people in the registry: for one vendor, broken, and with a taken name."""

from importlib.metadata import EntryPoint

import pytest

from engines.config.plugins import register_plugin
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.registry import built_in_registry
from infra.errors import ConfigError
from infra.plugins import OutsidePlugin


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: [])


def lookup(backend: str, device: str = "cpu", vendor: str | None = None) -> type:
    return built_in_registry().lookup(
        model_type="language_model", backend=backend, device=device, vendor=vendor
    )


def test_a_vendor_brings_its_own_engine_for_a_known_backend() -> None:
    register_plugin("backend", "fsdp2", "builtins:dict", devices=["cpu"], vendor="chip")
    assert lookup("fsdp2", vendor="chip") is dict
    assert lookup("fsdp2", vendor="cpu") is FSDP2Engine


def test_a_backend_of_one_device_says_where_it_runs() -> None:
    register_plugin("backend", "mine", "builtins:dict", devices=["npu"])
    assert lookup("mine", device="npu") is dict
    with pytest.raises(ConfigError, match="mine has no language_model on cpu .*it runs on: npu"):
        lookup("mine")


def test_a_broken_engine_stops_only_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("backend.mine", "no_such_engine:Engine", "rlhf.plugins")
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: [entry])
    assert lookup("fsdp2") is FSDP2Engine
    with pytest.raises(ConfigError) as caught:
        lookup("mine")
    assert str(caught.value).startswith(
        "training.backend: mine cannot be loaded from no_such_engine:Engine (ModuleNotFoundError: "
    )


def test_a_name_with_two_owners_is_refused_and_others_work() -> None:
    registry = built_in_registry()
    for owner in ("wheel-a==1.0", "wheel-b==1.0"):
        registry.register_plugin(OutsidePlugin("backend", "mine", f"{owner[:7]}:E", owner))
    registry.register_plugin(OutsidePlugin("backend", "fsdp2", "x:Y", "wheel-b==1.0"))
    asked = {"model_type": "language_model", "device": "cpu"}
    with pytest.raises(ConfigError, match="'mine' is registered by both wheel-a==1.0 and wheel-b"):
        registry.lookup(backend="mine", **asked)
    with pytest.raises(ConfigError, match="'fsdp2' is registered by both this project and wheel-b"):
        registry.lookup(backend="fsdp2", **asked)
