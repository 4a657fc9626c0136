"""Resolves the locks for NVIDIA GPUs against the package index, without downloading large files.

    python tests/locks/relock.py [--check] [NAME ...]

`infra/locks/cuda/NAME.in` says what an environment needs; its lock has every package at one
version. The packages of `NEAR` keep the version of `infra/locks/cpu/NAME.lock`, so that a job
computes with the same libraries on both devices. An environment without such a file is that of a
CPU, which the contract tests run, with the device's packages of `cuda/core.lock`.

With --check nothing is written, and the exit code is 1 if the index lacks a package of a lock for
this platform, or if the lock is no complete and consistent answer to its requirements.

pip asks for this interpreter and its platform. It ignores its configuration files and
PIP_CONSTRAINT, which may ask for CPU builds; PIP_INDEX_URL is kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
CUDA, CPU = LOCKS / "cuda", LOCKS / "cpu"
OWN = "rlhf-pipeline"
DEADLINE_S = 1500.0
PIN = re.compile(r"^([\w.\-]+)==([^\s;#]+)", re.MULTILINE)
CONFLICT = re.compile(r"The user requested \(constraint\) ([\w.\-]+)==")
MAX_SAID = 4000
NEAR = (
    *("accelerate", "mbridge", "megatron-core", "mlflow", "numpy", "peft", "prefect", "pyarrow"),
    *("pydantic", "ray", "safetensors", "tokenizers", "transformers", "xxhash"),
)
"""Packages that can change numbers, or whose data cross from one environment to another."""


class ResolutionError(Exception):
    """pip found no answer; the text is what it said."""


def pins(lock: Path) -> dict[str, str]:
    """Return the versions of a lock by canonical name."""
    found = PIN.findall(lock.read_text(encoding="utf-8"))
    return {str(canonicalize_name(name)): version for name, version in found}


def is_of_device(name: str) -> bool:
    """True for torch and what its CUDA build brings."""
    return name in {"torch", "triton"} or name.startswith(("nvidia-", "cuda-"))


def resolve(requirements: Path, constraints: Mapping[str, str], *options: str) -> dict[str, str]:
    """Return the version of every package that the requirements need, by canonical name.

    Raises:
        ResolutionError: no set of versions meets requirements and constraints.
    """
    with tempfile.TemporaryDirectory() as name:
        report, limits = Path(name) / "report.json", Path(name) / "constraints.txt"
        limits.write_text("".join(f"{each}=={at}\n" for each, at in constraints.items()))
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
            *("--use-feature=fast-deps", "--report", str(report), *options),
            *("--constraint", str(limits), "--requirement", str(requirements)),
        ]
        variables = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        variables.pop("PIP_CONSTRAINT", None)
        ended = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if ended.returncode:
            raise ResolutionError(f"{ended.stdout[-MAX_SAID:]}{ended.stderr[-MAX_SAID:]}")
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    versions = {
        str(canonicalize_name(each["metadata"]["name"])): each["metadata"]["version"]
        for each in found
    }
    versions.pop(OWN, None)
    return versions


def locked(name: str) -> dict[str, str]:
    """Return the versions of a new lock.

    A CPU version that the requirements exclude is dropped from the constraints.
    """
    cpu = pins(CPU / f"{name}.lock")
    requirements = CUDA / f"{name}.in"
    if not requirements.exists():
        device = {each: at for each, at in pins(CUDA / "core.lock").items() if is_of_device(each)}
        return {each: at for each, at in cpu.items() if not is_of_device(each)} | device
    near = {each: version for each, version in cpu.items() if each in NEAR}
    while True:
        try:
            return resolve(requirements, near)
        except ResolutionError as error:
            excluded = {str(canonicalize_name(each)) for each in CONFLICT.findall(str(error))}
            if not excluded & near.keys():
                raise
            sys.stderr.write(f"{name}: not as on a CPU: {', '.join(excluded & near.keys())}\n")
            near = {each: version for each, version in near.items() if each not in excluded}


def text_of(name: str, versions: Mapping[str, str]) -> str:
    """Return the text of a lock."""
    requirements = CUDA / f"{name}.in"
    if requirements.exists():
        said = requirements.read_text(encoding="utf-8").splitlines()
        head = "".join(f"{line}\n" for line in said if line.startswith("#"))
    else:
        head = f"# cpu/{name}.lock with the packages of cuda/core.lock that are of the device.\n"
    body = "".join(f"{each}=={versions[each]}\n" for each in sorted(versions))
    return f"{head}# Rewritten by `python tests/locks/relock.py {name}`.\n{body}"


def differences(name: str) -> list[str]:
    """Return how a lock differs from what the index has for it.

    Raises:
        ResolutionError: a package is absent, or the versions exclude each other.
    """
    lock, requirements = CUDA / f"{name}.lock", CUDA / f"{name}.in"
    own = pins(lock)
    asked = (requirements, own) if requirements.exists() else (lock, {}, "--no-deps")
    found = resolve(*asked)
    return [
        f"{each}: locked {own.get(each)}, resolved {found.get(each)}"
        for each in sorted({*own, *found})
        if own.get(each) != found.get(each)
    ]


def check(name: str) -> list[str]:
    """Return the faults of a lock; of a failed resolution, what pip said."""
    try:
        return differences(name)
    except (ResolutionError, subprocess.TimeoutExpired) as error:
        return [str(error)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(arguments)
    faults = 0
    for name in asked.names or sorted(path.stem for path in CPU.glob("*.lock")):
        lock = CUDA / f"{name}.lock"
        if asked.check:
            found = check(name)
            faults += len(found)
            sys.stdout.writelines(f"{name}: {line}\n" for line in found)
        else:
            lock.write_text(text_of(name, locked(name)), encoding="utf-8")
        sys.stdout.write(f"{name}: {len(pins(lock))} packages\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
