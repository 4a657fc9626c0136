"""Registers the plugin without an installation: RLHF_USE_EXTERNAL_MODULES=example_chip.register.

The control plane imports this module too, so it names its parts and imports none of them.
"""

from engines.config.plugins import register_plugin

register_plugin("platform", "example_chip", "example_chip.platform:ExampleChipPlatform")
for name in ("example_engine", "example_engine.value_model"):
    register_plugin(
        "backend",
        name,
        "example_chip.engine:ExampleEngine",
        options="example_chip.options:ExampleOptions",
    )
