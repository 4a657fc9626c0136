"""Names lead to engines, lazily; wrong names are told what exists."""

import subprocess
import sys

import pytest

from engines.config.plugins import ROLLOUT_ENGINES, register_plugin
from engines.config.rollout import RolloutConfig
from engines.rollout.base import Capability, create_rollout_engine
from engines.rollout.transformers.engine import TransformersEngine
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError, UnknownPluginError


def test_transformers_is_built_in(lab):
    engine = create_rollout_engine(
        "transformers", lab.directory, RolloutConfig(), "float32", CPUPlatform()
    )
    assert isinstance(engine, TransformersEngine)


def test_a_row_says_what_its_class_can_do():
    row = ROLLOUT_ENGINES.place("transformers")
    assert {one.value for one in TransformersEngine.capabilities} == {*row.capabilities}
    every = {one.value for one in Capability}
    assert all({*row.capabilities} <= every for row in ROLLOUT_ENGINES.rows)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(lab):
    with pytest.raises(UnknownPluginError) as caught:
        create_rollout_engine(
            "transformer", lab.directory, RolloutConfig(), "float32", CPUPlatform()
        )
    text = str(caught.value)
    assert text.startswith("rollout.engine: no 'transformer'; known: sglang, transformers")
    assert text.endswith("did you mean transformers?")
    assert "\n" not in text


def test_a_registered_class_is_found_and_a_taken_name_is_refused(monkeypatch):
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    target = "engines.rollout.transformers.engine:TransformersEngine"
    register_plugin("rollout", "mine", target)
    register_plugin("rollout", "mine", target)
    assert ROLLOUT_ENGINES.load("mine") is TransformersEngine
    assert ROLLOUT_ENGINES.names() == ["mine", "sglang", "transformers", "vllm"]
    register_plugin("rollout", "mine", "elsewhere:Engine")
    with pytest.raises(ConfigError, match="'mine' is registered by both .* and elsewhere:Engine"):
        ROLLOUT_ENGINES.load("mine")
    assert ROLLOUT_ENGINES.load("transformers") is TransformersEngine
    register_plugin("rollout", "transformers", "elsewhere:Engine")
    with pytest.raises(ConfigError, match="'transformers' is registered by both this project and"):
        ROLLOUT_ENGINES.load("transformers")


def test_the_table_imports_no_engine():
    code = (
        "import sys; from engines.config.plugins import ROLLOUT_ENGINES; "
        "ROLLOUT_ENGINES.names(); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
