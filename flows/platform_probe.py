"""Asks for this machine's accelerator in a child process: torch is not for the control plane.

Promises: a platform that is asked for by name and absent is refused before anything is started.
Does not promise: what another machine of a cluster has; its jobs ask again.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

from infra import env
from infra.errors import ConfigError, ServiceError

PROBE_DEADLINE_S = 120.0
AUTO = "auto"

_PROGRAM = """
import json, sys
from hardware.registry import detect
from infra.errors import ConfigError
try:
    platform, reason = detect(sys.argv[1])
    answer = {"name": platform.device_name, "reason": reason}
except ConfigError as error:
    answer = {"path": error.path, "problem": error.problem}
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class FoundPlatform:
    """The accelerator that jobs on this machine would use.

    Attributes:
        name: device type.
        reason: why it was chosen, in one line.
    """

    name: str
    reason: str


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
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM, requested],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            env=env.child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"the platform probe took over {PROBE_DEADLINE_S:g} s") from None
    lines = ended.stdout.splitlines()
    if ended.returncode != 0 or not lines:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ServiceError(f"the platform probe failed: {last}")
    answer = json.loads(lines[-1])
    if "problem" in answer:
        raise ConfigError(answer["path"], answer["problem"])
    return FoundPlatform(answer["name"], answer["reason"])


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
