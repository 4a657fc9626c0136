"""Surveys the devices of this machine in a child process, and compares them with a recipe.

Promises: the plan uses the same device as the stages, which is kept in the home, per boot,
installation and choice of visible devices.
Does not promise: devices of other machines of a cluster. A recipe for a cluster names its device,
and jobs refuse to start on another.
"""

import contextlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from platform import node
from typing import TypeVar
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ValidationError

from engines.config.plugins import TABLES
from engines.config.training import HardwareConfig
from infra import env
from infra.errors import ConfigError, JobSubmitError, ServiceError
from infra.identity.fingerprint import outside_code, source_closure
from infra.ray.api import RayApi, existing_token
from infra.ray.cluster import default_num_cpus
from infra.ray.jobs import num_nodes
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import sha256_json
from infra.survey_report import FoundPlatform, SurveyReport

_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Memory limits of a container, in cgroup v2 and v1."""
PROBE_DEADLINE_S = 120.0
AUTO = "auto"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def resolve_hardware(hardware: HardwareConfig, home: Path) -> HardwareConfig:
    """Return the setting with platform and device; a complete one is kept without RLHF_PLATFORM.

    Raises:
        ConfigError: the platform is unknown or unavailable, or another device is here or meant.
    """
    if hardware.platform != AUTO and hardware.device_kind and not env.RLHF_PLATFORM.get():
        TABLES["platform"].find(hardware.platform)
        return hardware
    if _is_elsewhere(env.RAY_ADDRESS.get()):
        raise ConfigError(
            "hardware.device_kind",
            "missing, and not detected for the cluster at RAY_ADDRESS; set it and "
            "hardware.platform to what `rlhf doctor` says on a node there",
        )
    found = surveyed(hardware.platform, home)
    if hardware.device_kind not in (None, found.label):
        raise ConfigError(
            "hardware.device_kind",
            f"got {hardware.device_kind!r}; {found.name} has {found.label!r} here; remove it",
        )
    return hardware.model_copy(update={"platform": found.name, "device_kind": found.label})


def check_devices(num_workers: int, hardware: HardwareConfig, home: Path) -> None:
    """Check that this machine has a place for each rank; skipped if RAY_ADDRESS names a cluster.

    Raises:
        ConfigError: the machine has too few places.
    """
    if env.RAY_ADDRESS.get():
        return
    if hardware.platform == "cpu":
        num_places = default_num_cpus()
        offer = f"Ray counts {num_places} CPUs here"  # `MIN_NUM_CPUS` or more
    else:
        num_places = surveyed(hardware.platform, home).num_devices
        offer = f"this machine has {num_places} ({hardware.device_kind})"
    if num_places is not None and num_workers > num_places:
        raise ConfigError(
            "training.num_workers",
            f"got {num_workers}; {offer}, one for each; lower it, or set RAY_ADDRESS to a cluster "
            "with more",
        )


def memory_shortage(checkpoint_bytes: int, hardware: HardwareConfig) -> str:
    """Return why this machine's memory cannot hold weights and optimizer state on the CPU.

    Empty if it can, if the platform is not `cpu`, or if RAY_ADDRESS names a cluster.
    """
    has_bytes = psutil.virtual_memory().total
    for limit in _MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            has_bytes = min(has_bytes, int(limit.read_text("utf-8")))
    if env.RAY_ADDRESS.get() or hardware.platform != "cpu" or checkpoint_bytes <= has_bytes:
        return ""
    return (
        f"need more than {checkpoint_bytes / 1e9:.1f} GB of memory for weights and optimizer, this "
        f"machine has {has_bytes / 1e9:.1f} GB"
    )


def _is_elsewhere(address: str | None) -> bool:
    if not address:
        return False
    if urlsplit(address).hostname not in _LOOPBACK:
        return True
    try:
        return num_nodes(RayApi(address, existing_token())) > 1
    except (JobSubmitError, ConfigError):
        return False  # reported when a job is submitted


def surveyed(requested: str, home: Path) -> FoundPlatform:
    """Return the platform that a job would choose; raises as `platform_of`."""
    platforms, installed = TABLES["platform"], Path(sysconfig.get_path("purelib"))
    probes = ["hardware.survey", *(row.module for row in platforms.rows)]
    visible = [v for v in env.child_environment().items() if v[0].endswith("VISIBLE_DEVICES")]
    depends_on = {
        "requested": [requested, env.RLHF_PLATFORM.get()],
        "host": [node(), _BOOT_ID.read_text("utf-8") if _BOOT_ID.exists() else ""],
        "installed": [str(installed), installed.stat().st_mtime_ns],
        "probes": [source_closure(probes, packages=()), outside_code(platforms.outside())],
        "visible": sorted(visible),
        "compilers": [shutil.which(each) for each in ("cc", "gcc", "clang")],
    }
    kept = home / "survey" / f"{sha256_json(depends_on)}.json"
    with contextlib.suppress(OSError, ValidationError):
        return FoundPlatform.model_validate_json(kept.read_bytes())
    found = platform_of(survey_machine(requested))
    with contextlib.suppress(OSError):  # a plan works without a writable home
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(kept, found.model_dump_json(indent=2).encode())
    return found


def survey_machine(*requested: str) -> SurveyReport:
    """Return a report of the platform that a job would choose on this machine.

    Without an argument, the report also has the result of loading every plugin.

    Raises:
        ServiceError: torch does not start, a plugin crashes the process, or time runs out.
    """
    return ask(
        SurveyReport, "the platform probe", PROBE_DEADLINE_S, ["hardware.survey", *requested]
    )


def platform_of(report: SurveyReport) -> FoundPlatform:
    """Return the platform of a report.

    Raises:
        ConfigError: the report refuses; ServiceError: it has neither platform nor refusal.
    """
    if report.platform is not None:
        return report.platform
    if report.refusal is None:
        raise ServiceError("the platform probe gave no answer")
    raise ConfigError(report.refusal.path, report.refusal.problem)


AnswerT = TypeVar("AnswerT", bound=BaseModel)


def ask(
    answer: type[AnswerT], what: str, deadline_s: float, command: Sequence[str], text: str = ""
) -> AnswerT:
    """Run a module of this project in a child process; parse its last line of output as JSON.

    `command` is the module's name and arguments, `text` its standard input.

    Raises:
        ServiceError: it gave no valid answer in time.
    """
    try:
        ended = subprocess.run(
            # -P keeps the current directory off the import path.
            [sys.executable, "-P", "-m", *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env=env.child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{what} took over {deadline_s:g} s") from None
    try:
        return answer.model_validate_json((ended.stdout.splitlines() or [""])[-1])
    except ValidationError:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ServiceError(f"{what} failed: {last}") from None
