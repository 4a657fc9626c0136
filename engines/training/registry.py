"""Training engines by (model type, backend, device, vendor).

Lookup goes (device, vendor) -> device -> any device -> error; the error lists what is registered
for that backend, or the known backends. Classes are imported when they are asked for, so a
backend whose library is missing fails by name and with its reason, and only when it is wanted.
Other people announce ``module:Class`` in the entry-point group `rlhf.plugins`, as
``backend.<name>`` (a language model) or ``backend.<name>.value_model``, any device; or by
`engines.config.plugins.register_plugin`, which can name devices and a vendor.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from engines.config.backends import BACKENDS, check_layout, job_interpreter
from engines.config.plugins import BUILT_IN
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import UnknownPluginError
from engines.training.base import BaseEngine
from engines.training.spec import EngineSpec, ModelType
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.plugins import OutsidePlugin, load_outside, outside_plugins, unknown_plugin

_SETTING = "training.backend"
ANY_DEVICE = "any"
_Device = tuple[str, str | None]


class EngineRegistry:
    """Where the class of each engine is."""

    def __init__(self) -> None:
        self._targets: dict[tuple[str, str], dict[_Device, str]] = {}
        self._outside: dict[tuple[str, str], list[OutsidePlugin]] = {}
        self._clashes: dict[tuple[str, str], ConfigError] = {}

    def register(
        self,
        *,
        model_type: str,
        backend: str,
        target: str,
        device: str | Sequence[str] = "cuda",
        vendor: str | None = None,
    ) -> None:
        """Announce an engine.

        Args:
            model_type: `language_model` or `value_model`.
            backend: what the setting `training.backend` calls it.
            target: its class as ``module:Class``.
            device: torch device type, or several, or `ANY_DEVICE`.
            vendor: None serves every vendor of the device.

        Raises:
            ConfigError: that place is taken.
        """
        devices = [device] if isinstance(device, str) else list(device)
        places = self._targets.setdefault((model_type, backend), {})
        for name in devices:
            taken = places.get((name, vendor))
            if taken is not None:
                raise ConfigError(
                    _SETTING,
                    f"{model_type} of {backend!r} on {name} is registered by both {taken} and "
                    f"{target}; remove one",
                )
            places[name, vendor] = target

    def register_plugin(self, plugin: OutsidePlugin) -> None:
        """Announce an engine of other people; a taken name is refused when it is asked for.

        Args:
            plugin: of the kind `backend`.
        """
        backend, _, model_type = plugin.name.partition(".")
        place = (model_type or "language_model", backend)
        others = self._outside.setdefault(place, [])
        taken = [other.source for other in others if other.collides_with(plugin)]
        own = BACKENDS.get(backend)
        if own is not None and place[0] in own.targets and not plugin.extends:
            taken.append("this project")
        others.append(plugin)
        try:
            if taken:
                raise ConfigError(
                    _SETTING,
                    f"{backend!r} is registered by both {taken[0]} and {plugin.source}; remove one",
                )
            self.register(
                model_type=place[0],
                backend=backend,
                target=plugin.target,
                device=plugin.devices or ANY_DEVICE,
                vendor=plugin.vendor,
            )
        except ConfigError as error:
            self._clashes[place] = error

    def names(self, model_type: str) -> list[str]:
        """Backends that have an engine of that type on some device."""
        return sorted(backend for kind, backend in self._targets if kind == model_type)

    def lookup(
        self, *, model_type: str, backend: str, device: str, vendor: str | None = None
    ) -> type[BaseEngine]:
        """The class of an engine.

        Args:
            model_type: `language_model` or `value_model`.
            backend: name in the setting `training.backend`.
            device: torch device type of the platform.
            vendor: of the platform.

        Returns:
            The class that fits best.

        Raises:
            UnknownPluginError: nothing is registered there; the text lists what is.
            ConfigError: its library cannot be imported; the text says why.
        """
        if (model_type, backend) in self._clashes:
            raise self._clashes[model_type, backend]
        places = self._targets.get((model_type, backend))
        if places is None:
            problem = unknown_plugin(backend, self.names(model_type))
            raise UnknownPluginError(_SETTING, f"{problem} (for a {model_type})")
        tries = ((device, vendor), (device, None), (ANY_DEVICE, None))
        target = next((places[place] for place in tries if place in places), None)
        if target is None:
            on = ", ".join(f"{d} ({v})" if v else d for d, v in sorted(places, key=str))
            raise UnknownPluginError(
                _SETTING, f"{backend} has no {model_type} on {device} ({vendor}); it runs on: {on}"
            )
        for outside in self._outside.get((model_type, backend), ()):
            if outside.target == target:
                return load_outside(outside, _SETTING)
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            plugin = BUILT_IN["backend"].get(backend)
            extra = (
                f"; pip install 'rlhf-pipeline[{plugin.extra}]'" if plugin and plugin.extra else ""
            )
            raise ConfigError(_SETTING, f"{backend} cannot be imported ({error}){extra}") from error


def built_in_registry() -> EngineRegistry:
    """A registry of this project's engines and those of installed plugins."""
    registry = EngineRegistry()
    for name, backend in BACKENDS.items():
        for model_type, target in backend.targets.items():
            for device in backend.devices:
                registry.register(
                    model_type=model_type,
                    backend=name,
                    target=backend.device_engines.get(device, target),
                    device=device,
                )
    for plugin in outside_plugins("backend"):
        registry.register_plugin(plugin)
    return registry


def create_engine(
    model_type: ModelType,
    hf_dir: Path,
    training: TrainingConfig,
    optimizer: OptimizerConfig | None,
    total_steps: int,
    platform: PlatformBase,
    seed: int,
    *,
    temperature: float = 1.0,
) -> BaseEngine:
    """Make an engine of the configured backend for a platform; `initialize` builds it.

    Args:
        model_type: `language_model` or `value_model`.
        hf_dir: Hugging Face directory of the model.
        training: backend and numerics.
        optimizer: None makes an engine that only infers.
        total_steps: optimizer steps of the run, for the schedule.
        platform: the device; RLHF_ENGINE_DEVICE and RLHF_ENGINE_VENDOR override what is looked up.
        seed: of everything random in the engine.
        temperature: of the distribution that log-probabilities speak of.

    Returns:
        The engine of this rank.

    Raises:
        ConfigError: no such backend on this platform, or an option, layout or feature it has not.
    """
    check_layout(training)
    engine_class = built_in_registry().lookup(
        model_type=model_type,
        backend=training.backend,
        device=env.RLHF_ENGINE_DEVICE.get() or platform.device_name,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.vendor_name,
    )
    if job_interpreter(training.backend, _SETTING) is not None:
        raise ConfigError(
            _SETTING, f"{training.backend} runs in a job environment of its own, not in this one"
        )
    check_options(engine_class, training)
    spec = EngineSpec(
        hf_dir, training, optimizer, total_steps, platform, seed, temperature, model_type
    )
    return engine_class(spec)


def check_options(engine_class: type[BaseEngine], training: TrainingConfig) -> None:
    """Validate `training.options` with the backend's own schema.

    Args:
        engine_class: of the backend.
        training: holds the options.

    Raises:
        ConfigError: an option is unknown to the backend or has a wrong value.
    """
    try:
        engine_class.Options.model_validate(training.options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = ", ".join(engine_class.Options.model_fields) or "none"
        problem = (
            f"not an option of {training.backend}; it has: {known}"
            if first["type"] == "extra_forbidden"
            else f"got {first['input']!r}; {first['msg']}"
        )
        raise ConfigError(f"training.options.{name}", problem) from error
