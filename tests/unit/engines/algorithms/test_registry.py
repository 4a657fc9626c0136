"""Registering algorithm parts: aliases, duplicates, unknown names, options."""

from importlib.metadata import EntryPoint

import pytest
from pydantic import Field

from engines.algorithms.registry import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    NoOptions,
    Registry,
    parse_options,
)
from engines.config.base import StrictModel
from engines.config.plugins import BUILT_IN
from engines.errors import UnknownPluginError
from infra.errors import ConfigError


class TauOptions(StrictModel):
    tau: float = Field(default=1.0, gt=0)


class BetaOptions(StrictModel):
    beta: float


def test_aliases_lead_to_one_part():
    registry: Registry = Registry("loss_mode")

    @registry.register("first", "second", paper="p", columns=("advantages",), options=TauOptions)
    def function():
        return 7

    assert registry.names() == ["first", "second"]
    assert registry.get("first", "x") is registry.get("second", "x")
    part = registry.get("second", "x")
    assert part.name == "first"
    assert part.function is function
    assert part.columns == {"advantages"}


def test_a_taken_name_is_refused_and_nothing_is_registered():
    registry: Registry = Registry("loss_mode")
    registry.register("a", paper="p")(len)
    with pytest.raises(ValueError, match="'a' is already builtins.len"):
        registry.register("b", "a", paper="p")(max)
    assert registry.names() == ["a"]


def test_a_registration_needs_a_name():
    with pytest.raises(ValueError, match="needs a name"):
        Registry("loss_mode").register(paper="p")


def test_an_unknown_name_says_the_nearest_and_lists_the_rest():
    with pytest.raises(UnknownPluginError) as caught:
        ADVANTAGES.get("gpro", "rl.algorithm.adv_estimator")
    text = str(caught.value)
    assert text.startswith("rl.algorithm.adv_estimator: no 'gpro'; known: ")
    assert "did you mean grpo?" in text
    assert "\n" not in text


def test_options_go_to_the_schema_that_knows_them():
    tau, beta = parse_options({"beta": 2, "tau": 3}, [TauOptions, BetaOptions], "o")
    assert tau == TauOptions(tau=3.0)
    assert beta == BetaOptions(beta=2.0)


@pytest.mark.parametrize(
    ("options", "schemas", "path", "word"),
    [
        ({"tua": 1}, [TauOptions], "rl.algorithm.options.tua", "did you mean tau"),
        ({"tau": 1}, [NoOptions], "rl.algorithm.options.tau", "none"),
        ({"tau": -1}, [TauOptions], "rl.algorithm.options.tau", "greater than 0"),
        ({}, [BetaOptions], "rl.algorithm.options.beta", "required"),
    ],
)
def test_bad_options_name_their_path(options, schemas, path, word):
    with pytest.raises(ConfigError, match=word) as caught:
        parse_options(options, schemas, "rl.algorithm.options")
    assert caught.value.path == path


def test_the_part_of_an_entry_point_is_imported_on_demand(monkeypatch, tmp_path):
    (tmp_path / "outside_part.py").write_text(
        "from engines.algorithms.registry import POLICY_LOSSES\n"
        "@POLICY_LOSSES.register('outside', paper='none')\n"
        "def loss(inputs):\n    return inputs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("loss_mode.outside", "outside_part:loss", "rlhf.plugins")

    monkeypatch.setattr("infra.plugins.entry_points", lambda group: [entry])
    monkeypatch.setattr(POLICY_LOSSES, "_parts", dict(POLICY_LOSSES._parts))
    assert POLICY_LOSSES.get("outside", "x").paper == "none"


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS])
def test_the_table_of_the_control_plane_names_the_same_functions(registry):
    table = BUILT_IN[registry.kind]
    assert sorted(table) == registry.names()
    for name, plugin in table.items():
        part = registry.get(name, "x")
        assert plugin.target == f"{part.function.__module__}:{part.function.__qualname__}"
        assert plugin.group_relative == part.group_relative
