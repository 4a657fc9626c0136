"""Registers the plugin without an installation: RLHF_USE_EXTERNAL_MODULES=example_chip.register.

The control plane imports this module too, so it names its classes and imports none of them.
"""

from engines.config.plugins import register_plugin
from hardware.registry import register_platform

register_platform("example_chip", "example_chip.platform:ExampleChipPlatform")
for name in ("example_engine", "example_engine.value_model"):
    register_plugin("backend", name, "example_chip.engine:ExampleEngine")
