"""Which device the jobs will compute on: asked once, in a child process, since torch answers.

Promises: a plan names the device that its stages count with; a machine is asked once per boot,
installation and choice of visible devices, and the answer kept in the home.
Does not promise: what another machine of a cluster has. A recipe for one names it, and jobs refuse
to start on another.
"""

import contextlib
import sysconfig
from pathlib import Path
from platform import node
from urllib.parse import urlsplit

import psutil
from pydantic import ValidationError

from engines.config.plugins import TABLES
from engines.config.training import HardwareConfig
from flows.preflight.child import ask
from infra import env
from infra.errors import ConfigError, JobSubmitError, ServiceError
from infra.identity.fingerprint import outside_code, source_closure
from infra.ray.api import RayApi, existing_token
from infra.ray.embedded import default_num_cpus
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
    """The platform and the device that a recipe's setting leads to.

    Args:
        hardware: of the recipe; what it states in full is not asked for.
        home: where this machine's answer is kept.

    Raises:
        ConfigError: the platform is unknown or not available, or the devices are another machine's.
    """
    if hardware.platform != AUTO and hardware.device_kind and not env.RLHF_PLATFORM.get():
        TABLES["platform"].find(hardware.platform)
        return hardware
    if _is_elsewhere(env.RAY_ADDRESS.get()):
        raise ConfigError(
            "hardware.device_kind",
            "missing; the devices of the cluster at RAY_ADDRESS are not asked from here; set it "
            "and hardware.platform to what `rlhf doctor` says on a node there",
        )
    found = _surveyed(hardware.platform, home)
    if hardware.device_kind not in (None, found.label):
        raise ConfigError(
            "hardware.device_kind",
            f"got {hardware.device_kind!r}; {found.name} has {found.label!r} here; remove it",
        )
    return hardware.model_copy(update={"platform": found.name, "device_kind": found.label})


def check_devices(num_workers: int, hardware: HardwareConfig, home: Path) -> None:
    """Refuse more ranks than this machine has places for, unless a cluster was named.

    Args:
        home: where this machine's answer is kept.

    Raises:
        ConfigError: says how many were asked for, and how many there are.
    """
    if env.RAY_ADDRESS.get():
        return
    if hardware.platform == "cpu":
        num_places = default_num_cpus()
        offer = f"Ray counts {num_places} CPUs here"  # more than there are on a small machine
    else:
        num_places = _surveyed(hardware.platform, home).num_devices
        offer = f"this machine has {num_places} ({hardware.device_kind})"
    if num_places is not None and num_workers > num_places:
        raise ConfigError(
            "training.num_workers",
            f"got {num_workers}; {offer}, one for each; lower it, or set RAY_ADDRESS to a cluster "
            "with more",
        )


def memory_shortage(checkpoint_bytes: int, hardware: HardwareConfig) -> str:
    """Say why the memory of this machine cannot hold the training; empty if it can.

    Args:
        checkpoint_bytes: of the weights and of what the optimizer keeps of them; gradients and
            activations come on top.

    Returns:
        What is needed and what there is, in words; empty if it may fit, if another device holds
        it, or if a cluster was named.
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
    """True if jobs may run on other machines than this one."""
    if not address:
        return False
    if urlsplit(address).hostname not in _LOOPBACK:
        return True
    try:
        return num_nodes(RayApi(address, existing_token())) > 1
    except (JobSubmitError, ConfigError):
        return False  # submitting a job reports what is wrong


def _surveyed(requested: str, home: Path) -> FoundPlatform:
    platforms, installed = TABLES["platform"], Path(sysconfig.get_path("purelib"))
    probes = ["hardware.survey", *(row.module for row in platforms.rows)]
    visible = [v for v in env.child_environment().items() if v[0].endswith("VISIBLE_DEVICES")]
    depends_on = {
        "requested": [requested, env.RLHF_PLATFORM.get()],
        "host": [node(), _BOOT_ID.read_text("utf-8") if _BOOT_ID.exists() else ""],
        "installed": [str(installed), installed.stat().st_mtime_ns],
        "probes": [source_closure(probes, packages=()), outside_code(platforms.outside())],
        "visible": sorted(visible),
    }
    kept = home / "survey" / f"{sha256_json(depends_on)}.json"
    with contextlib.suppress(OSError, ValidationError):
        return FoundPlatform.model_validate_json(kept.read_bytes())
    found = platform_of(survey_machine(requested))
    with contextlib.suppress(OSError):  # a plan needs no home
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(kept, found.model_dump_json(indent=2).encode())
    return found


def survey_machine(*requested: str) -> SurveyReport:
    """The platform that a job would choose here.

    Args:
        *requested: a platform's name, or `auto`; nothing is `auto`, with what comes of loading
            every plugin.

    Raises:
        ServiceError: torch does not start, or a plugin takes the process down.
    """
    command = ["hardware.survey", *requested]
    return ask(SurveyReport, "the platform probe", PROBE_DEADLINE_S, command)


def platform_of(report: SurveyReport) -> FoundPlatform:
    """The platform of a report.

    Raises:
        ConfigError: it has none; says why.
    """
    if report.platform is not None:
        return report.platform
    if report.refusal is None:
        raise ServiceError("the platform probe gave no answer")
    raise ConfigError(report.refusal.path, report.refusal.problem)
