"""The locks of job environments hold what jobs import, at versions that the project allows."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "infra" / "locks"
CORE = "core"
ENVIRONMENTS = sorted(lock.stem for lock in LOCKS.glob("*.lock") if lock.stem != CORE)
JOBS = sorted(
    f"engines.jobs.{path.stem}"
    for path in (ROOT / "engines" / "jobs").glob("*.py")
    if "run_job(" in path.read_text(encoding="utf-8") and path.stem != "harness"
)
"""`harness` imports what its environment alone has; tests/e2e/test_harness.py runs it there."""
OTHER_VERSIONS = {("vllm", "fastapi"), ("sglang", "fastapi")}
"""Pinned by the engine; nothing of a job imports it."""
IMPORT_WITHOUT = """
import importlib, sys
from importlib.machinery import PathFinder

absent, modules = (set(each.split(",")) for each in sys.argv[1:])

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
for module in sorted(modules):
    importlib.import_module(module)
"""
"""A process in which some packages are not installed."""


def pins(name: str) -> dict[str, str]:
    """Versions by distribution."""
    text = (LOCKS / f"{name}.lock").read_text(encoding="utf-8")
    found = re.findall(r"^([\w.\-]+)==([^\s;#]+)", text, re.MULTILINE)
    return {canonicalize_name(distribution): version for distribution, version in found}


def test_jobs_import_nothing_that_their_environment_has_not() -> None:
    """Without whatever some environment lacks: what is imported there is imported in each."""
    core = pins(CORE).keys()
    absent = set[str]().union(*(core - pins(name).keys() for name in ENVIRONMENTS))
    packages = [
        package
        for package, distributions in packages_distributions().items()
        if absent.issuperset(map(canonicalize_name, distributions))
    ]
    assert {"mlflow", "prefect", "megatron"} <= {*packages}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, ",".join(packages), ",".join(JOBS)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_versions_are_those_that_the_project_allows(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = pins(name)
    for requirement in map(Requirement, project["dependencies"]):
        version = found.get(canonicalize_name(requirement.name))
        if version and (name, requirement.name) not in OTHER_VERSIONS:
            assert requirement.specifier.contains(version), (requirement, version)
