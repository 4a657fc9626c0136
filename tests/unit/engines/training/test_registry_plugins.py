"""Engines of other people in the table: for one vendor, broken, and with a taken name."""

from importlib.metadata import EntryPoint

import pytest

from engines.config.backends import ENGINES
from engines.config.plugins import register_plugin
from engines.training.backends.fsdp.engine import FSDP2Engine
from infra.errors import ConfigError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: [])


def lookup(backend: str, device: str = "cpu", vendor: str | None = None) -> type:
    return ENGINES.load(backend, device=device, vendor=vendor)


def test_a_vendor_brings_its_own_engine_for_a_known_backend() -> None:
    register_plugin("backend", "fsdp2", "builtins:dict", devices=["cpu"], vendor="chip")
    assert lookup("fsdp2", vendor="chip") is dict
    assert lookup("fsdp2", vendor="cpu") is FSDP2Engine


def test_a_backend_of_one_device_says_where_it_runs() -> None:
    register_plugin("backend", "mine", "builtins:dict", devices=["npu"])
    assert lookup("mine", device="npu") is dict
    with pytest.raises(ConfigError, match="mine does not run on cpu .*it runs on: npu"):
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
    for target in ("one:E", "other:E"):
        register_plugin("backend", "mine", target)
    register_plugin("backend", "fsdp2", "x:Y")
    with pytest.raises(ConfigError, match="'mine' is registered by both one:E .* and other:E"):
        lookup("mine")
    with pytest.raises(ConfigError, match="'fsdp2' is registered by both this project and x:Y"):
        lookup("fsdp2")
    assert lookup("fsdp").__name__ == "FSDPEngine"
