"""The built-in training backends: their engines, features, and how those are tested.

One table, readable without torch, for the engine registry, the layout checks, the contract tests,
`rlhf engines` and the reference page. External backends are asked at run time.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from infra.plugins import PluginTable, Row


class Tested(Enum):
    """How a claim of the table is tested."""

    CONTRACT = "contract"
    """Contract tests on CPU process groups, in continuous integration."""
    ENVIRONMENT = "environment"
    """The contract tests, inside the backend's job environment (`make env-<backend>`)."""
    RANKS = "ranks"
    """Separate tests on CPU process groups, in continuous integration."""
    GPU = "gpu"
    """A test under `tests/gpu/` that needs an accelerator."""
    CPU_TWIN = "cpu twin"
    """Contract tests of the same code on CPU process groups; not on the device itself."""
    REGISTRY = "registry"
    """Only that it is found and reports what is missing; no such device was available."""


@dataclass(frozen=True)
class Backend:
    """One training backend; its classes and functions are named as ``module:name``.

    Attributes:
        devices: torch device type -> how it is tested.
        parallelism: dimension -> how it is tested; an absent dimension is refused.
        features: `lora`, `moe`, `vlm`, ... -> how it is tested.
        requires: module from an extra or environment; None: no such module.
        extra: extra of this project with that module; None: no extra.
        environment: its job environment (`make env-<name>`); None: the project's own.
        options: schema of `training.options`.
        device_engines: device -> engine and options schema used there, for all model types.
        not_together: pairs of dimensions or features that cannot be combined.
    """

    language_model: str
    devices: Mapping[str, Tested]
    parallelism: Mapping[str, Tested]
    value_model: str | None = None
    features: Mapping[str, Tested] = field(default_factory=dict)
    requires: str | None = None
    extra: str | None = None
    environment: str | None = None
    options: str | None = None
    check_model: str | None = None
    device_engines: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    not_together: tuple[tuple[str, str], ...] = ()

    @property
    def targets(self) -> dict[str, str]:
        """Model type -> ``module:Class``."""
        value_model = {"value_model": self.value_model} if self.value_model else {}
        return {"language_model": self.language_model, **value_model}


@dataclass(frozen=True, kw_only=True)
class BackendRow(Row):
    """A training engine.

    Attributes:
        check_model: ``module:function``, importable without torch. It gets a model's directory and
            text configuration and raises `ConfigError` about `model.path` if the engine cannot
            compute the model. None: the engine checks when it runs.
    """

    check_model: str | None = None


_ON_PACKED_SEQUENCES = "engines.training.supported_models:check_packed"
_HF_PARALLELISM = {
    "data": Tested.CONTRACT,
    "hybrid": Tested.CONTRACT,
    "ulysses": Tested.CONTRACT,
}
_HF_FEATURES = {
    "lora": Tested.CONTRACT,
    "ema": Tested.CONTRACT,
    "adapter stream": Tested.CONTRACT,
    "moe": Tested.CONTRACT,
    "compile": Tested.CONTRACT,
    "liger": Tested.GPU,
    "vlm": Tested.RANKS,
}

BACKENDS: Mapping[str, Backend] = {
    "fsdp": Backend(
        language_model="engines.training.backends.fsdp.fsdp1:FSDPEngine",
        value_model="engines.training.backends.fsdp.fsdp1:FSDPEngine",
        options="engines.training.backends.options:FSDPOptions",
        check_model=_ON_PACKED_SEQUENCES,
        devices={"cpu": Tested.CONTRACT, "cuda": Tested.GPU},
        parallelism=_HF_PARALLELISM,
        features=_HF_FEATURES,
        not_together=(("ulysses", "vlm"),),
    ),
    "fsdp2": Backend(
        language_model="engines.training.backends.fsdp.engine:FSDP2Engine",
        value_model="engines.training.backends.fsdp.engine:FSDP2Engine",
        options="engines.training.backends.options:FSDP2Options",
        check_model=_ON_PACKED_SEQUENCES,
        devices={"cpu": Tested.CONTRACT, "cuda": Tested.GPU},
        parallelism=_HF_PARALLELISM,
        features=_HF_FEATURES,
        not_together=(("ulysses", "vlm"),),
    ),
    "megatron": Backend(
        language_model="engines.training.backends.megatron.engine:MegatronEngine",
        value_model="engines.training.backends.megatron.engine:MegatronEngine",
        options="engines.training.backends.options:MegatronOptions",
        check_model="engines.training.supported_models:check_megatron",
        devices={"cpu": Tested.CONTRACT, "cuda": Tested.GPU, "npu": Tested.REGISTRY},
        device_engines={
            "npu": (
                "engines.training.backends.mindspeed.engine:MindSpeedMegatronEngine",
                "engines.training.backends.options:MindSpeedOptions",
            )
        },
        parallelism={
            "data": Tested.CONTRACT,
            "tensor": Tested.CONTRACT,
            "pipeline": Tested.CONTRACT,
            "virtual pipeline": Tested.CONTRACT,
            "context": Tested.CONTRACT,
            "expert": Tested.CONTRACT,
        },
        features={"lora": Tested.CONTRACT, "ema": Tested.CONTRACT, "moe": Tested.CONTRACT},
        requires="mbridge",
        extra="megatron",
    ),
    "veomni": Backend(
        language_model="engines.training.backends.veomni.engine:VeOmniEngine",
        devices={"cpu": Tested.ENVIRONMENT, "cuda": Tested.GPU},
        parallelism={
            "data": Tested.ENVIRONMENT,
            "hybrid": Tested.ENVIRONMENT,
            "ulysses": Tested.ENVIRONMENT,
        },
        value_model="engines.training.backends.veomni.engine:VeOmniEngine",
        options="engines.training.backends.options:VeOmniOptions",
        check_model=_ON_PACKED_SEQUENCES,
        features={"lora": Tested.ENVIRONMENT, "ema": Tested.ENVIRONMENT},
        requires="veomni",
        environment="veomni",
    ),
    "automodel": Backend(
        language_model="engines.training.backends.automodel.engine:AutomodelEngine",
        value_model="engines.training.backends.automodel.engine:AutomodelEngine",
        options="engines.training.backends.options:AutomodelOptions",
        check_model=_ON_PACKED_SEQUENCES,
        devices={"cpu": Tested.ENVIRONMENT, "cuda": Tested.GPU},
        parallelism={
            "data": Tested.ENVIRONMENT,
            "hybrid": Tested.ENVIRONMENT,
            "tensor": Tested.ENVIRONMENT,
            "ulysses": Tested.ENVIRONMENT,
        },
        features={"lora": Tested.ENVIRONMENT, "ema": Tested.ENVIRONMENT},
        requires="nemo_automodel",
        environment="automodel",
        not_together=(("lora", "tensor"), ("ulysses", "tensor")),
    ),
    "torchtitan": Backend(
        language_model="engines.training.backends.torchtitan.engine:TorchTitanEngine",
        options="engines.training.backends.options:TorchTitanOptions",
        check_model="engines.training.supported_models:check_torchtitan",
        devices={"cpu": Tested.ENVIRONMENT, "cuda": Tested.GPU},
        parallelism={
            "data": Tested.ENVIRONMENT,
            "hybrid": Tested.ENVIRONMENT,
            "tensor": Tested.ENVIRONMENT,
        },
        features={"ema": Tested.ENVIRONMENT},
        requires="torchtitan",
        environment="torchtitan",
    ),
}


def engine_name(backend: str, model_type: str) -> str:
    """Return the name in `ENGINES` of a backend's engine for a model type."""
    return backend if model_type == "language_model" else f"{backend}.{model_type}"


def _rows() -> Iterator[BackendRow]:
    for backend, entry in BACKENDS.items():
        for model_type, target in entry.targets.items():
            for device in entry.devices:
                engine, options = entry.device_engines.get(device, (target, entry.options))
                yield BackendRow(
                    name=engine_name(backend, model_type),
                    target=engine,
                    requires=entry.requires,
                    extra=entry.extra,
                    environment=entry.environment,
                    options=options,
                    check_model=entry.check_model,
                    devices=(device,),
                )


ENGINES = PluginTable("backend", "training.backend", list(_rows()), BackendRow)


def backends_with(feature: str) -> list[str]:
    """Return the built-in backends with a feature, in the order of the table."""
    return [name for name, backend in BACKENDS.items() if feature in backend.features]


def excluded_by(backend: str, used: Collection[str]) -> frozenset[str]:
    """Return the dimensions and features that cannot be combined with one of `used`."""
    entry = BACKENDS.get(backend)
    pairs = entry.not_together if entry is not None else ()
    both_ways = (*pairs, *((second, first) for first, second in pairs))
    return frozenset(second for first, second in both_ways if first in used)
