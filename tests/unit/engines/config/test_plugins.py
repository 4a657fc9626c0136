"""The torch-free table of plugins says what the registries of the engine floor say."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from engines.algorithms.registry import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.config import plugins
from engines.config.plugins import BUILT_IN, Plugin, PluginKind, check_plugin
from infra.errors import ConfigError


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_name_leads_to_something(kind: PluginKind) -> None:
    for plugin in BUILT_IN[kind].values():
        module, _, attribute = plugin.target.partition(":")
        if plugin.requires and importlib.util.find_spec(plugin.requires) is None:
            assert importlib.util.find_spec(module) is not None
        else:
            assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize(
    ("kind", "registry"),
    [
        ("adv_estimator", ADVANTAGES),
        ("loss_mode", POLICY_LOSSES),
        ("kl_loss_type", KL_ESTIMATORS),
    ],
)
def test_algorithms_are_the_registered_ones(kind: PluginKind, registry) -> None:
    importlib.import_module("engines.algorithms.validation")
    assert sorted(BUILT_IN[kind]) == registry.names()
    for name, plugin in BUILT_IN[kind].items():
        part = registry.get(name, kind)
        assert plugin.group_relative == part.group_relative
        assert plugin.target == f"{part.function.__module__}:{part.function.__name__}"


def install(site: Path, distribution: str, name: str) -> None:
    """What pip leaves of a wheel that announces a plugin."""
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlhf.plugins]\n{name} = {distribution}:make\n")


def test_plugins_of_other_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "wheel_a", "rollout.mine")
    assert check_plugin("rollout", "mine", "rollout.engine") is None
    with pytest.raises(ConfigError, match="known: mine, transformers; did you mean mine?"):
        check_plugin("rollout", "mina", "rollout.engine")
    install(tmp_path, "wheel_b", "rollout.mine")
    with pytest.raises(ConfigError) as caught:
        check_plugin("rollout", "mine", "rollout.engine")
    assert str(caught.value) == (
        "rollout.engine: 'mine' is registered by both wheel_a==1.0 and wheel_b==1.0; remove one"
    )
    install(tmp_path, "wheel_c", "rollout.transformers")
    with pytest.raises(ConfigError, match="both wheel_c==1.0 and this project; remove one"):
        check_plugin("rollout", "transformers", "rollout.engine")


def test_a_plugin_of_this_project_needs_no_extra() -> None:
    assert check_plugin("backend", "fsdp2", "training.backend") is BUILT_IN["backend"]["fsdp2"]
    with pytest.raises(
        ConfigError, match=r"training.backend: no 'fsdp3'; known: .*; did you mean fsdp\?"
    ):
        check_plugin("backend", "fsdp3", "training.backend")


def test_an_extra_counts_only_when_its_library_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Plugin("somewhere.engine:Engine", "no_such_library", "fast")
    # `json` stands for a library that is installed; nothing imports the target.
    present = Plugin("somewhere.engine:Engine", "json", "fast")
    rows = {**BUILT_IN["backend"], "absent": absent, "present": present}
    monkeypatch.setattr(plugins, "BUILT_IN", {**BUILT_IN, "backend": rows})
    assert check_plugin("backend", "present", "training.backend") is present
    with pytest.raises(ConfigError) as caught:
        check_plugin("backend", "absent", "training.backend")
    assert str(caught.value) == (
        "training.backend: absent needs the extra: pip install 'rlhf-pipeline[fast]' (no module "
        "named no_such_library)"
    )
    with pytest.raises(ConfigError, match="known: absent, .*; did you mean absent"):
        check_plugin("backend", "absnt", "training.backend")
