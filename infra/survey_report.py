"""JSON messages from a child process that may import torch to its parent, which may not."""

from infra.frozen_model import FrozenModel


class FoundPlatform(FrozenModel):
    """The accelerator that jobs on this machine would use, and the reason in one line.

    `device` is the torch device type, `label` the product name, `num_devices` None if unknown.
    `memory_bytes` is the memory of one device; None for a CPU. `has_compiler` is True if Triton and
    a C compiler are installed. `supports_fp8`: see `PlatformBase`.
    """

    name: str
    device: str
    reason: str
    label: str
    num_devices: int | None = None
    memory_bytes: int | None = None
    has_compiler: bool = True
    supports_fp8: bool = False


class FoundDevice(FrozenModel):
    """One device; `architecture` is like `sm_90` or `gfx942`, None if its library has no name."""

    label: str
    architecture: str | None
    total_bytes: int
    free_bytes: int | None


class DeviceFacts(FrozenModel):
    """Driver, libraries and devices of an accelerator; None is unknown.

    `runtime` is like `CUDA 13.0`, `communication` like `NCCL 2.29.7`, `links` has the number of
    device pairs per kind of link, `attention` names the kernels of packed attention.
    """

    runtime: str
    driver: str | None
    communication: str | None
    links: str | None
    attention: str | None = None
    devices: tuple[FoundDevice, ...]


class Refusal(FrozenModel):
    """Why there is no platform: path and problem of a `ConfigError`."""

    path: str
    problem: str


class FoundPlugin(FrozenModel):
    """Result of loading the external plugin `name` (``<kind>.<name>``).

    `detail` has owner and target; `problem` says why it does not load, None if it does.
    """

    name: str
    detail: str
    problem: str | None = None


class SurveyReport(FrozenModel):
    """Platform or refusal; facts of its devices and plugins if requested.

    Plugins are ordered as `infra.plugins.outside_rows`. A CPU has no `devices`; `nvidia_driver` is
    the version of a loaded driver, which jobs need not use.
    """

    platform: FoundPlatform | None = None
    devices: DeviceFacts | None = None
    nvidia_driver: str | None = None
    refusal: Refusal | None = None
    plugins: tuple[FoundPlugin, ...] = ()
