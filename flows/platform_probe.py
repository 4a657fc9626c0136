"""Asks for this machine's accelerator in a child process: torch is not for the control plane.

Promises: a platform that is asked for by name and absent is refused before anything is started.
Does not promise: what another machine of a cluster has; its jobs ask again.
"""

from flows.child import ask
from infra import env
from infra.errors import ConfigError, ServiceError
from infra.survey_report import FoundPlatform, SurveyReport

PROBE_DEADLINE_S = 120.0
AUTO = "auto"


def probe_platform(requested: str) -> FoundPlatform:
    """The platform that a job would choose here.

    Args:
        requested: a platform's name, or `auto`.

    Returns:
        The platform, and why it was chosen.

    Raises:
        ConfigError: it is unknown, or not available.
        ServiceError: torch does not start.
    """
    return platform_of(_ask(requested))


def survey_machine() -> SurveyReport:
    """The platform that `auto` leads to, and what comes of loading every plugin.

    Returns:
        The report of a child process that loaded them all.

    Raises:
        ServiceError: torch does not start, or a plugin takes the process down.
    """
    return _ask()


def platform_of(report: SurveyReport) -> FoundPlatform:
    """The platform of a report.

    Args:
        report: of a child process.

    Returns:
        Its platform.

    Raises:
        ConfigError: it has none; says why.
    """
    if report.platform is not None:
        return report.platform
    if report.refusal is None:
        raise ServiceError("the platform probe gave no answer")
    raise ConfigError(report.refusal.path, report.refusal.problem)


def check_platform(requested: str) -> None:
    """Refuse a platform that was asked for by name and is not here; `auto` asks for nothing.

    Args:
        requested: a platform's name, or `auto`.

    Raises:
        ConfigError: it is unknown, or not available.
    """
    on_this_machine = env.RAY_ADDRESS.get() is None
    if on_this_machine and (requested != AUTO or env.RLHF_PLATFORM.get()):
        probe_platform(requested)


def _ask(*arguments: str) -> SurveyReport:
    return ask("the platform probe", PROBE_DEADLINE_S, SurveyReport, "hardware.survey", *arguments)
