"""Checks of this machine before a run: its device, memory, disk space, store and database.

A child process loads what this process must not: torch, plugins, users' rewards.
Promises: the plan uses the same device as the stages. The device is cached in the home, per boot,
installation and choice of visible devices. A child process gives an answer of the stated type, or
an error of one line, within the deadline.
Does not promise: devices of other machines of a cluster. A recipe for a cluster names its device,
and jobs refuse to start on another.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from platform import node
from typing import TypeVar
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ValidationError

from engines.config.plugins import TABLES
from engines.config.recipe import Recipe
from engines.config.training import HardwareConfig
from flows.plan import plan_run
from infra import env
from infra.errors import ConfigError, JobSubmitError, ServiceError, StoreDeniedError, StoreError
from infra.identity.fingerprint import outside_code, source_closure
from infra.ray.api import RayApi, existing_token
from infra.ray.cluster import default_num_cpus
from infra.ray.jobs import num_nodes
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import sha256_json
from infra.store.storage import open_storage
from infra.survey_report import FoundPlatform, SurveyReport

AnswerT = TypeVar("AnswerT", bound=BaseModel)


def ask(
    answer: type[AnswerT], what: str, deadline_s: float, command: Sequence[str], text: str = ""
) -> AnswerT:
    """Run a module of this project and parse its last line of output as JSON.

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
    """Return the setting with platform and device filled in; a complete one is returned as it is.

    Raises:
        ConfigError: the platform is unknown or unavailable, or this machine has other devices.
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
    """Check that this machine has a place for each rank; skipped if RAY_ADDRESS names a cluster.

    Raises:
        ConfigError: it has too few.
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
    """Return why this machine's memory cannot hold weights and optimizer state on the CPU.

    Empty if it may, if the platform is not `cpu`, or if RAY_ADDRESS names a cluster.
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
    with contextlib.suppress(OSError):  # a plan works without a writable home
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(kept, found.model_dump_json(indent=2).encode())
    return found


def survey_machine(*requested: str) -> SurveyReport:
    """Return the platform that a job would choose on this machine.

    Without an argument, the report also has the result of loading every plugin.

    Raises:
        ServiceError: torch does not start, or a plugin crashes the process.
    """
    return ask(
        SurveyReport, "the platform probe", PROBE_DEADLINE_S, ["hardware.survey", *requested]
    )


def platform_of(report: SurveyReport) -> FoundPlatform:
    """Return the platform of a report.

    Raises:
        ConfigError: it has none; says why.
    """
    if report.platform is not None:
        return report.platform
    if report.refusal is None:
        raise ServiceError("the platform probe gave no answer")
    raise ConfigError(report.refusal.path, report.refusal.problem)


NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "afs", "fuse.sshfs", "fuse.glusterfs"})
"""File systems on which database locks are unreliable."""
MOUNTS = Path("/proc/self/mounts")


def file_system_of(path: Path) -> str | None:
    """Return the type (`ext4`, `nfs4`) of an absolute path's file system; None if it is unknown."""
    try:
        # Not psutil: it reads /etc/mtab, which may be a stale file in a container.
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, found = path.resolve(), ("", None)
    for line in lines:
        mounted, kind = (
            re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
            for text in line.split(" ")[1:3]
        )
        # A later mount on the same path hides an earlier one.
        if place.is_relative_to(mounted) and len(mounted) >= len(found[0]):
            found = (mounted, kind)
    return found[1]


NUM_CHECKPOINTS = 2
"""The newest checkpoint stays until the next one is complete."""
TRAINING_STAGES = ("sft", "reward_model", "preference", "rl_round")
"""Label prefixes of the stages that write step checkpoints."""


def check_store(uri: str) -> None:
    """Check that the store answers and allows access.

    Raises:
        ConfigError: names `location.store`.
        StoreError: its service failed or does not answer.
    """
    try:
        open_storage(uri).probe()
    except ConfigError as error:
        raise ConfigError("location.store", error.problem) from error
    except StoreDeniedError as error:
        raise ConfigError("location.store", str(error)) from error
    except StoreError as error:
        raise type(error)(f"location.store: {error}") from error
    except OSError as error:
        raise ConfigError(
            "location.store",
            f"got {uri}, which cannot be made or written to ({error.strerror}); need a directory "
            "of yours; name another",
        ) from error


def check_tracking_database(uri: str) -> None:
    """Check that an SQLite database of runs is on a disk with working locks.

    Raises:
        ConfigError: it is on a network disk.
    """
    if not uri.startswith("sqlite:///"):
        return
    kind = file_system_of(Path(uri.removeprefix("sqlite:///")).absolute())
    if kind in NETWORK:
        raise ConfigError(
            "location.tracking_uri",
            f"got {uri}, which is on {kind}; sqlite needs a local disk; set it, or "
            "MLFLOW_TRACKING_URI, to a server",
        )


def check_room(recipe: Recipe, checkpoint_bytes: int, force: Mapping[str, str]) -> None:
    """Check that the store has space for checkpoints, and the memory for the training.

    Raises:
        ConfigError: a stage has to train and there is too little, or `plan_run` failed.
    """
    shortage = memory_shortage(checkpoint_bytes, recipe.hardware)
    if shortage and _trains(recipe, force):
        raise ConfigError(
            "model.path",
            f"got {recipe.model.path}: {shortage}; take a smaller model or training.lora, or set "
            "RAY_ADDRESS to a cluster",
        )
    if "://" in recipe.store_uri:  # the free space of a bucket is unknown
        return
    num_checkpoints = NUM_CHECKPOINTS + recipe.keeps_average
    need_bytes = num_checkpoints * checkpoint_bytes
    free_bytes = shutil.disk_usage(recipe.store_uri).free
    if free_bytes < need_bytes and _trains(recipe, force):
        raise ConfigError(
            "location.store",
            f"need {num_checkpoints} x {checkpoint_bytes / 1e9:.1f} GB for checkpoints of "
            f"{recipe.model.path}, {recipe.store_uri} has {free_bytes / 1e9:.1f} GB free; free "
            "some, or name another place",
        )


def _trains(recipe: Recipe, force: Mapping[str, str]) -> bool:
    return any(
        each.label.startswith(TRAINING_STAGES) and each.status not in {"hit", "likely_reuse"}
        for each in plan_run(recipe, force).stages
    )
