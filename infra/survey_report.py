"""What a child process that may import torch tells its parent, which may not. JSON on a pipe."""

from infra.frozen_model import FrozenModel


class FoundPlatform(FrozenModel):
    """The accelerator that jobs on this machine would use.

    Attributes:
        name: of the platform.
        device: torch device type.
        reason: why it was chosen, in one line.
        label: product name of the device.
        num_devices: how many of them this machine has; None: nobody counted them.
    """

    name: str
    device: str
    reason: str
    label: str
    num_devices: int | None = None


class Refusal(FrozenModel):
    """Why there is no platform: the parts of a `ConfigError`.

    Attributes:
        path: where the value stands, as the user wrote it.
        problem: what is wrong and what to do about it.
    """

    path: str
    problem: str


class FoundPlugin(FrozenModel):
    """What came of loading one plugin of other people.

    Attributes:
        name: ``<kind>.<name>``.
        detail: who brings it, where it is, and for a platform whether it is here.
        problem: why it does not load; None if it does.
    """

    name: str
    detail: str
    problem: str | None = None


class SurveyReport(FrozenModel):
    """One answer: a platform or a refusal, and the plugins if they were asked for.

    Attributes:
        platform: the platform, if there is one.
        refusal: why not, if there is none.
        plugins: in the order of `infra.plugins.outside_rows`.
    """

    platform: FoundPlatform | None = None
    refusal: Refusal | None = None
    plugins: tuple[FoundPlugin, ...] = ()
