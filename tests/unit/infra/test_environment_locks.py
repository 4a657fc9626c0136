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

from tests.locks.relock import NEAR

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "infra" / "locks"
CORE = "core"
DEVICES = ("cpu", "cuda")
ENVIRONMENTS = sorted(lock.stem for lock in LOCKS.glob("cpu/*.lock") if lock.stem != CORE)
BOTH = [(device, name) for device in DEVICES for name in ENVIRONMENTS]
JOBS = sorted(
    f"engines.jobs.{path.stem}"
    for path in (ROOT / "engines" / "jobs").glob("*.py")
    if "run_job(" in path.read_text(encoding="utf-8") and path.stem != "harness"
)
"""`harness` imports what its environment alone has; tests/e2e/test_harness.py runs it there."""
OTHER_VERSIONS = {
    *((device, name, "fastapi") for device in DEVICES for name in ("vllm", "sglang")),
    *(("cuda", "sglang", each) for each in ("huggingface-hub", "torch")),
}
"""Pinned by the engine. No job runs in these environments, only replicas, which ask no hub."""
OWN_COMMUNICATORS = {"sglang"}
"""Environments with another torch; `engines.controller.rollout` lets no communicator join them."""
OTHER_ON_CUDA = {("sglang", "tokenizers")}
"""Pinned by what the environment is for, whose pins the CPU environment does not follow."""
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


def pins(name: str, device: str = "cpu") -> dict[str, str]:
    """Versions by distribution."""
    text = (LOCKS / device / f"{name}.lock").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(("device", "name"), BOTH)
def test_versions_are_those_that_the_project_allows(device: str, name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = pins(name, device)
    for requirement in map(Requirement, project["dependencies"]):
        version = found.get(canonicalize_name(requirement.name))
        if version and (device, name, requirement.name) not in OTHER_VERSIONS:
            assert requirement.specifier.contains(version), (requirement, version)


def test_every_environment_has_a_lock_for_each_device() -> None:
    for device in DEVICES:
        assert {path.stem for path in (LOCKS / device).glob("*.lock")} == {CORE, *ENVIRONMENTS}
    asked = {path.stem for path in (LOCKS / "cuda").glob("*.in")}
    assert asked == {CORE, "vllm", "sglang"}


@pytest.mark.parametrize(("device", "name"), BOTH)
def test_environments_that_meet_speak_one_ray(device: str, name: str) -> None:
    assert pins(name, device)["ray"] == pins(CORE, device)["ray"]


@pytest.mark.parametrize("name", [CORE, *ENVIRONMENTS])
def test_a_gpu_lock_has_the_cuda_build_and_the_communicators_of_core(name: str) -> None:
    found, core = pins(name, "cuda"), pins(CORE, "cuda")
    assert not [version for version in found.values() if "+cpu" in version]
    assert {"torch", "nvidia-nccl-cu13", "triton"} <= found.keys()
    same = all(found[each] == core[each] for each in ("torch", "nvidia-nccl-cu13"))
    assert same is (name not in OWN_COMMUNICATORS)


@pytest.mark.parametrize("name", [CORE, *ENVIRONMENTS])
def test_both_devices_compute_with_the_same_libraries(name: str) -> None:
    cpu, cuda = pins(name, "cpu"), pins(name, "cuda")
    different = {each for each in cpu.keys() & {*NEAR} if cpu[each] != cuda.get(each)}
    assert different <= {each for where, each in OTHER_ON_CUDA if where == name}
