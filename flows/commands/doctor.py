"""`rlhf doctor`: one line per check of this machine, and a verdict.

It checks versions, packages, devices, plugins, names, engines, storage and services.

Promises: a failed check is reported and the others go on; no check starts a lasting process.
Torch and plugins are probed in a child process; modules that register plugins are imported here.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from engines.config.backends import ENGINES
from engines.config.plugins import ROLLOUT_ENGINES, TABLES
from flows.commands.check import Check, tried
from flows.commands.device_checks import device_checks, environment_checks, write_survey
from flows.machine_survey import platform_of, survey_machine
from infra import env
from infra.errors import ConfigError, PipelineError
from infra.host.ports import NO_ANSWER
from infra.plugins import external_modules, import_external_modules
from infra.store.atomic import atomic_write_bytes
from infra.store.storage import open_storage

DISTRIBUTION = "rlhf-pipeline"
PROJECT_PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
MIN_FREE_BYTES = 2 * 1024**3
HTTP_TIMEOUT_S = 3.0
MARKS = {"ok": "ok  ", "warning": "warn", "error": "FAIL"}


def main(arguments: argparse.Namespace) -> int:
    """Run all checks; the exit code is 1 if a required part is broken."""
    checks: list[Check] = []
    for check in _all_checks(arguments.store, arguments.survey):
        checks.append(check)
        if not arguments.json:
            sys.stdout.write(f"{MARKS[check.status]}  {check.name:<22} {check.detail}\n")
            sys.stdout.flush()
    broken = [check.name for check in checks if check.status == "error"]
    verdict = f"broken: {', '.join(broken)}" if broken else "this machine can run the pipeline"
    if arguments.json:
        rows = [dataclasses.asdict(check) for check in checks]
        verdict = json.dumps({"checks": rows, "verdict": verdict}, indent=2)
    sys.stdout.write(f"{verdict}\n")
    return 1 if broken else 0


def _all_checks(store: str | None, survey: Path | None) -> Iterator[Check]:
    """Yield all checks, causes before consequences; `store` is checked besides the home."""
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Check(
        "python", "ok" if good else "error", f"{platform.python_version()} at {sys.executable}"
    )
    yield from _distributions()
    yield from _packages()
    broken = {module.name: module for module in import_external_modules()}
    for name, owner in external_modules().items():
        detail = str(broken.get(name, f"imported for {owner.removeprefix('environment.')}"))
        yield Check(f"module {name}", "error" if name in broken else "ok", detail)
    yield from _platform_and_plugins(survey)
    # Finds names that several plugins or packages register; platforms were checked above.
    for kind, table in TABLES.items():
        for name in sorted({row.name for row in table.outside()} if kind != "platform" else ()):
            try:
                table.find_all(name)
            except ConfigError as error:
                yield Check(f"plugin {kind}.{name}", "error", error.problem)
    yield from _engines()
    yield _storage(env.home())
    if store is not None:
        yield tried("store", lambda: open_storage(store).probe())
    yield _service("Prefect server", env.PREFECT_API_URL.get(), "/health", "embedded")
    yield _service("MLflow server", env.MLFLOW_TRACKING_URI.get(), "/health", "a local database")


def _distributions() -> Iterator[Check]:
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check(DISTRIBUTION, "error", "not installed; pip install --editable .")
        return
    for requirement in map(Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = next(iter(metadata.distributions(name=requirement.name)), None)
            version = found.version if found else "not installed"
            if found and requirement.specifier.contains(version, prereleases=True):
                yield Check(requirement.name, "ok", version)
            else:
                yield Check(requirement.name, "error", f"{version}; pip install '{requirement}'")


def _packages() -> Iterator[Check]:
    """Check that no other distribution shadows the packages here, whose names are common words."""
    root = Path(__file__).parents[2]
    for name in PROJECT_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).parent if spec and spec.origin else None
        shadow = f"resolves to {found}, not to {root / name}; change PYTHONPATH or uninstall it"
        is_ours = found == root / name
        yield Check(
            f"package {name}", "ok" if is_ours else "error", str(found) if is_ours else shadow
        )


def _platform_and_plugins(survey: Path | None) -> Iterator[Check]:
    try:
        report = survey_machine()
    except PipelineError as error:
        yield Check("platform", "error", str(error))
        return

    def chosen() -> str:
        found = platform_of(report)
        return f"{found.device} {found.label} ({found.reason})"

    yield tried("platform", chosen)
    if report.platform is not None:
        yield from device_checks(report.devices)
    if survey is not None:
        yield tried("survey", lambda: write_survey(platform_of(report), survey))
    yield from environment_checks(report.nvidia_driver)
    checks = (
        Check(f"plugin {each.name}", "error" if each.problem else "ok", each.problem or each.detail)
        for each in report.plugins
    )
    yield from dict.fromkeys(checks)  # two owners of a name have one problem


def _storage(home: Path) -> Check:
    probe = home / ".doctor"
    try:
        home.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(probe, b"ok")
        probe.unlink()
    except OSError as error:
        return Check("storage", "error", f"{home} is not writable: {error}; set RLHF_HOME")
    free = shutil.disk_usage(home).free
    detail = f"{home}, {free / 1024**3:.1f} GiB free"
    return Check("storage", "ok" if free >= MIN_FREE_BYTES else "warning", detail)


def _service(name: str, url: str | None, path: str, otherwise: str) -> Check:
    if not url or not url.startswith("http"):
        return Check(name, "ok", f"none configured: {url or otherwise}")
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=HTTP_TIMEOUT_S):  # noqa: S310  the user's own address
            return Check(name, "ok", f"{url} answers")
    except urllib.error.HTTPError as error:
        return Check(name, "error", f"{url} answers {error.code}; check address and credentials")
    except (*NO_ANSWER, ValueError) as error:
        return Check(name, "error", f"{url} does not answer ({error}); start it or unset it")


def _engines() -> Iterator[Check]:
    """Report a missing engine as a warning, because every engine is optional."""
    for table in (ENGINES, ROLLOUT_ENGINES):
        for row in {row.name: row for row in table.rows if "." not in row.name}.values():
            try:
                table.find(row.name)
            except ConfigError as error:
                yield Check(f"{table.kind} {row.name}", "warning", error.problem)
                continue
            version = "built in"
            if row.requires:
                found = metadata.packages_distributions().get(row.requires.partition(".")[0], [])
                version = ", ".join(f"{each} {metadata.version(each)}" for each in found)
            yield Check(f"{table.kind} {row.name}", "ok", version or "installed")
