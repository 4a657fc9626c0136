"""The tables of parts: what is ours is there, and what a name may cost."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from engines.config.backends import ENGINES
from engines.config.options import schema_of
from engines.config.plugins import ROLLOUT_ENGINES, TABLES, PluginKind
from infra.errors import ConfigError
from infra.plugins import PluginTable, Row


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_every_name_leads_to_something(kind: PluginKind) -> None:
    for row in TABLES[kind].rows:
        module, _, attribute = row.target.partition(":")
        schema_of(row, kind)
        if row.requires and importlib.util.find_spec(row.requires) is None:
            assert importlib.util.find_spec(module) is not None
        elif not (row.requires or "npu" in row.devices):
            assert callable(getattr(importlib.import_module(module), attribute))


def install(site: Path, distribution: str, name: str) -> None:
    """What pip leaves of a wheel that announces a plugin."""
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlhf.plugins]\n{name} = {distribution}:make\n")


def test_plugins_of_other_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "wheel_a", "rollout.mine")
    assert ROLLOUT_ENGINES.find("mine").owner == "wheel_a==1.0"
    with pytest.raises(
        ConfigError, match="known: mine, sglang, transformers, vllm; did you mean mine?"
    ):
        ROLLOUT_ENGINES.find("mina")
    install(tmp_path, "wheel_b", "rollout.mine")
    with pytest.raises(ConfigError) as caught:
        ROLLOUT_ENGINES.find("mine")
    assert str(caught.value) == (
        "rollout.engine: 'mine' is registered by both wheel_a==1.0 and wheel_b==1.0; remove one"
    )
    install(tmp_path, "wheel_c", "rollout.transformers")
    with pytest.raises(ConfigError, match="both this project and wheel_c==1.0; remove one"):
        ROLLOUT_ENGINES.find("transformers")


def test_a_plugin_of_this_project_needs_no_extra() -> None:
    assert ENGINES.find("fsdp2").is_ours
    with pytest.raises(
        ConfigError, match=r"training.backend: no 'fsdp3'; known: .*; did you mean fsdp\?"
    ):
        ENGINES.find("fsdp3")


def test_an_extra_counts_only_when_its_library_is_here() -> None:
    # `json` stands for a library that is installed; nothing imports the target.
    table = PluginTable(
        "backend",
        "training.backend",
        [
            Row(name="absent", target="x:Y", requires="no_such_library", extra="fast"),
            Row(name="present", target="x:Y", requires="json", extra="fast"),
        ],
        Row,
    )
    assert table.find("present").extra == "fast"
    with pytest.raises(ConfigError) as caught:
        table.find("absent")
    assert str(caught.value) == (
        "training.backend: absent needs the extra: pip install 'rlhf-pipeline[fast]' (no module "
        "named no_such_library)"
    )
    with pytest.raises(ConfigError, match="known: absent, .*; did you mean absent"):
        table.find("absnt")
