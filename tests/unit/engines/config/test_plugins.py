"""The torch-free table of plugins says what the registries of the engine floor say."""

import importlib

import pytest

from engines.algorithms.registry import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.config.plugins import BUILT_IN, PluginKind, check_plugin, usable_names
from infra.errors import ConfigError


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_usable_name_leads_to_something(kind: PluginKind) -> None:
    for name in usable_names(kind):
        plugin = BUILT_IN[kind][name]
        module, _, attribute = plugin.target.partition(":")
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
    importlib.import_module("engines.algorithms")
    assert sorted(BUILT_IN[kind]) == registry.names()
    for name, plugin in BUILT_IN[kind].items():
        part = registry.get(name, kind)
        assert plugin.group_relative == part.group_relative
        assert plugin.target == f"{part.function.__module__}:{part.function.__name__}"


def test_a_plugin_of_this_project_needs_no_extra() -> None:
    assert check_plugin("backend", "fsdp2", "training.backend") is BUILT_IN["backend"]["fsdp2"]
    with pytest.raises(ConfigError, match="training.backend: no 'fsdp3'; known: fsdp2; did you"):
        check_plugin("backend", "fsdp3", "training.backend")
