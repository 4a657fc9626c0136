"""Choose the platform of a process.

`RLHF_PLATFORM` overrides the setting `hardware.platform`. `auto` probes external platforms first (a
vendor's package detects its device best), then `hardware.platforms` in order, the CPU last. A
requested platform that is not available is an error; no other is chosen instead.
"""

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from platform import machine

from hardware.base import Availability, PlatformBase
from hardware.platforms import PLATFORMS
from infra import env
from infra.errors import ConfigError
from infra.plugins import Row, import_external_modules, load_row, reason_of

_SETTING = PLATFORMS.setting
_CPU_INFO = Path("/proc/cpuinfo")


def names() -> list[str]:
    """Return all platform names in probing order: external ones first, the CPU last."""
    found = dict.fromkeys(row.name for row in (*PLATFORMS.outside(), *PLATFORMS.rows))
    return sorted(found, key=lambda name: name == "cpu")


def create(name: str) -> PlatformBase:
    """Import and create a platform, without checking that it is available.

    Raises:
        ConfigError: the name is unknown or has two owners, or an external platform does not load.
    """
    row = PLATFORMS.find(name)
    platform_class = load_row(row, _SETTING)
    with _plugin_boundary(row, "does not start"):
        platform: PlatformBase = platform_class()
    platform.name = name
    return platform


@contextmanager
def _plugin_boundary(row: Row, problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # plugin boundary
        if row.is_ours:
            raise
        raise ConfigError(
            _SETTING, f"{row.name} of {row.source} {problem} ({reason_of(error)})"
        ) from error


def availability(name: str) -> Availability:
    """Probe if a platform can be used here; a platform that does not load is not available."""
    try:
        platform = create(name)
        with _plugin_boundary(PLATFORMS.find(name), "cannot be probed"):
            return platform.is_available()
    except ConfigError as error:
        return Availability(False, error.problem)
    except ImportError as error:
        return Availability(False, f"cannot be imported: {error}")


def detect(requested: str = "auto") -> tuple[PlatformBase, str]:
    """Choose the platform of this process; return it and one line that says why.

    Raises:
        ConfigError: the name is unknown, that platform is not available here, or (`auto`) a name
            has two owners.
    """
    override = env.RLHF_PLATFORM.get()
    if (override or requested) != "auto":
        return _requested(override or requested, "RLHF_PLATFORM" if override else _SETTING)
    for name in names():
        PLATFORMS.find_all(name)  # raises if two plugins have the name
    refused = {f"what {m.name} registers": m.reason for m in import_external_modules()}
    for name in names():
        found = availability(name)
        if found.ok:
            others = f" ({_not(refused)})" if refused else ""
            return create(name), f"{name}: {found.reason}{others}"
        refused[name] = found.reason
    raise ConfigError(_SETTING, f"nothing to run on: {_not(refused)}")


def planned(name: str) -> PlatformBase:
    """Return the platform that other processes compute on; only `auto` probes this machine."""
    return detect(name)[0] if name == "auto" else create(name)


def check_planned(platform: PlatformBase, name: str, device_kind: str | None) -> None:
    """Raise ConfigError unless this process has the planned device; `device_kind` None: any."""
    if device_kind is None:
        return
    found = platform.device_label()
    if (platform.name, found) != (name, device_kind):
        raise ConfigError(
            "hardware.device_kind",
            f"got {platform.name} ({found}) where {name} ({device_kind}) was planned; run on that, "
            "or set hardware.platform and hardware.device_kind to this and run again",
        )


def processor() -> str:
    """Return the model of the host's processor; the architecture if the model is unknown."""
    text = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.exists() else ""
    found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return found[1] if found else machine()


def _requested(name: str, source: str) -> tuple[PlatformBase, str]:
    rows = (*PLATFORMS.outside(), *PLATFORMS.rows)
    meant = [row.name for row in rows if name in row.also_called]
    refused: dict[str, str] = {}
    for candidate in (name,) if name in names() else meant or (name,):
        platform = create(candidate)
        found = availability(candidate)
        if found.ok:
            return platform, f"{candidate}: asked for by {source}; {found.reason}"
        refused[candidate] = found.reason
    usable = [other for other in names() if availability(other).ok]
    raise ConfigError(
        _SETTING,
        f"{name} was asked for and is not available "
        f"({'; '.join(dict.fromkeys(refused.values()))}); use {' or '.join(usable)}, "
        f"or install what it lacks (asked for by {source})",
    )


def _not(refused: Mapping[str, str]) -> str:
    """Describe why platforms were rejected, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"not {', '.join(group)}: {reason}" for reason, group in by_reason.items())


@cache
def has_kernel_compiler() -> bool:
    """True if Triton and a C compiler, which Triton calls, are installed."""
    compilers = ("cc", "gcc", "clang")
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and any(shutil.which(each) for each in compilers)
