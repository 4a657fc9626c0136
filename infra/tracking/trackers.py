"""The trackers by name."""

import importlib

from infra.errors import ConfigError
from infra.plugins import load_outside, outside_plugins, unknown_plugin
from infra.tracking.tracker import Tracker, TrackerSettings

BUILT_IN = {"mlflow": "infra.tracking.mlflow_tracker:MlflowTracker"}


def make_tracker(name: str, settings: TrackerSettings, path: str = "location.tracker") -> Tracker:
    """A tracker, not opened.

    Args:
        name: as the recipe calls it.
        settings: of the run.
        path: the setting that names it, for the error line.

    Returns:
        The tracker.

    Raises:
        ConfigError: nobody brings it, or it cannot be loaded.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)(settings)
    outside = {plugin.name: plugin for plugin in outside_plugins("tracker")}
    if name not in outside:
        raise ConfigError(path, unknown_plugin(name, sorted({*BUILT_IN, *outside})))
    return load_outside(outside[name], path)(settings)
