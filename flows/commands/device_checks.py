"""What `rlhf doctor` says of the devices, and of the environments that compute on them."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from engines.cost.machines import machine_like
from flows.commands.check import Check
from infra.errors import ConfigError
from infra.job_environments import EnvironmentBuild, build_of, environments
from infra.store.atomic import atomic_write_bytes
from infra.survey_report import DeviceFacts, FoundPlatform

CUDA_13_DRIVER = 580
"""First major version of a driver that runs CUDA 13; `make` installs for it."""


def device_checks(facts: DeviceFacts | None) -> Iterator[Check]:
    """Yield a line for driver, libraries and links, and one per device."""
    if facts is None:
        yield Check("devices", "ok", "none but the CPU")
        return
    parts = [
        f"driver {facts.driver or 'unknown'}",
        facts.runtime,
        *filter(None, [facts.communication, facts.links and f"links {facts.links}"]),
        *([f"attention by {facts.attention}"] if facts.attention else []),
    ]
    yield Check("devices", "ok", ", ".join(parts))
    for number, device in enumerate(facts.devices):
        free = "" if device.free_bytes is None else f", {device.free_bytes / 2**30:.1f} GiB free"
        yield Check(
            f"device {number}",
            "ok",
            f"{device.label}, {device.architecture or 'architecture unknown'}, "
            f"{device.total_bytes / 2**30:.1f} GiB{free}",
        )


def environment_checks(nvidia_driver: str | None) -> Iterator[Check]:
    """Yield a line per environment: what it computes with; a warning if it leaves a device idle."""
    own = _own_build()
    if own is None:
        return
    if nvidia_driver is None or own.built_for != "cpu":
        yield Check("environment core", "ok", str(own))
    else:
        is_new = int(nvidia_driver.partition(".")[0]) >= CUDA_13_DRIVER
        what_to_do = "run make DEVICE=cuda" if is_new else f"CUDA 13 needs driver {CUDA_13_DRIVER}"
        detail = (
            f"{own}; jobs take the CPU although NVIDIA driver {nvidia_driver} is here; {what_to_do}"
        )
        yield Check("environment core", "warning", detail)
    for name, interpreter in environments().items():
        build = build_of(interpreter, name)
        if build is None:
            yield Check(f"environment {name}", "warning", f"has no torch; run make env-{name}")
        elif build.built_for == own.built_for:
            yield Check(f"environment {name}", "ok", str(build))
        else:
            device = {"CUDA": "cuda", "cpu": "cpu"}.get(own.built_for)
            what_to_do = f"run make DEVICE={device} env-{name}" if device else "install it anew"
            detail = f"{build}; the project's own is for {own.built_for}; {what_to_do}"
            yield Check(f"environment {name}", "warning", detail)


def write_survey(found: FoundPlatform, path: Path) -> str:
    """Describe this machine in a file, unless it has no accelerator; return what was written."""
    if found.memory_bytes is None:
        raise ConfigError("--survey", f"got {path}; need an accelerator; this machine has none")
    machine = machine_like(found.name, found.label, found.memory_bytes, found.num_devices or 1)
    here = machine.model_copy(update={"host_memory_bytes": psutil.virtual_memory().total})
    atomic_write_bytes(path, here.model_dump_json(indent=2).encode())
    return f"{path} describes {here.name} for rlhf plan --on; its rates are those of data sheets"


def _own_build() -> EnvironmentBuild | None:
    found = importlib.util.find_spec("torch")  # does not import it
    if found is None or found.origin is None:
        return None
    return build_of(Path(sys.executable), "", Path(found.origin).parents[1])
