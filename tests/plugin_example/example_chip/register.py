"""Registers what the package brings; one row for each part, beside the file that holds it.

An installed package names this module in its entry points, another is listed in
RLHF_USE_EXTERNAL_MODULES. The control plane imports it too, so it names its parts and imports none.
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
register_plugin(
    "adv_estimator",
    "example_advantage",
    "example_chip.algorithm:example_advantages",
    paper="the mean of a group as its baseline",
    group_relative=True,
)
register_plugin(
    "loss_mode",
    "example_loss",
    "example_chip.algorithm:example_loss",
    paper="importance weights truncated from above",
    columns=("advantages",),
    options="example_chip.options:ClippedOptions",
)
register_plugin("kl_loss_type", "example_kl", "example_chip.algorithm:example_kl", paper="twice k2")
register_plugin("rollout", "example_rollout", "example_chip.parts:ExampleRollout")
register_plugin("reward", "example_reward", "example_chip.parts:compute_score")
register_plugin("preprocessor", "flashcards", "example_chip.parts:Flashcards")
register_plugin("tracker", "example_tracker", "example_chip.tracker:SqliteTracker")
