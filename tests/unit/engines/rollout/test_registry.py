"""Names lead to engines, lazily; wrong names are told what exists."""

import subprocess
import sys

import pytest

from engines.config.rollout import RolloutConfig
from engines.errors import UnknownPluginError
from engines.rollout.registry import RolloutRegistry, create_rollout_engine
from engines.rollout.transformers_engine import TransformersEngine
from hardware.cpu import CPUPlatform


def test_transformers_is_built_in(lab):
    engine = create_rollout_engine(
        "transformers", lab.directory, RolloutConfig(), "float32", CPUPlatform()
    )
    assert isinstance(engine, TransformersEngine)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(lab):
    with pytest.raises(UnknownPluginError) as caught:
        create_rollout_engine(
            "transformer", lab.directory, RolloutConfig(), "float32", CPUPlatform()
        )
    text = str(caught.value)
    assert text.startswith("rollout.engine: no 'transformer'; known: transformers")
    assert text.endswith("did you mean transformers?")
    assert "\n" not in text


def test_a_registered_class_is_found_and_names_are_not_taken_twice(monkeypatch):
    monkeypatch.setattr(RolloutRegistry, "_registered", {})
    target = "engines.rollout.transformers_engine:TransformersEngine"
    RolloutRegistry.register("mine", target)
    RolloutRegistry.register("mine", target)
    assert RolloutRegistry.load("mine") is TransformersEngine
    with pytest.raises(ValueError, match="already"):
        RolloutRegistry.register("mine", "elsewhere:Engine")
    with pytest.raises(ValueError, match="already"):
        RolloutRegistry.register("transformers", "elsewhere:Engine")
    with pytest.raises(ValueError, match="module:Class"):
        RolloutRegistry.register("other", "elsewhere.Engine")


def test_the_registry_imports_no_engine():
    code = (
        "import sys; from engines.rollout.registry import RolloutRegistry; "
        "RolloutRegistry.targets(); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
