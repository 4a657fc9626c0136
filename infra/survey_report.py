"""JSON messages from a child process that may import torch to its parent, which may not."""

from infra.frozen_model import FrozenModel


class FoundPlatform(FrozenModel):
    """The accelerator that jobs on this machine would use, and the reason in one line.

    `device` is the torch device type, `label` the product name, `num_devices` None if unknown.
    """

    name: str
    device: str
    reason: str
    label: str
    num_devices: int | None = None


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
    """Platform or refusal, and plugins if requested, ordered as `infra.plugins.outside_rows`."""

    platform: FoundPlatform | None = None
    refusal: Refusal | None = None
    plugins: tuple[FoundPlugin, ...] = ()
