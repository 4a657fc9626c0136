"""Virtual environments of jobs whose libraries conflict with the project's, or are rarely needed.

`make env-<name>` creates one in `.envs/` of the checkout from `infra/locks/<device>/<name>.lock`.
Each machine of a cluster needs it at the same path. No function here starts an interpreter.
"""

import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ENVIRONMENTS_DIR = Path(__file__).resolve().parents[1] / ".envs"

TORCH_BUILDS = {"maca": "maca", "hip": "rocm", "cuda": "CUDA", "xpu": "xpu"}
"""Attribute of `torch.version` -> what torch is built for; the first that is set counts.

MetaX's build also states the CUDA version that it is compatible with.
"""


@dataclass(frozen=True)
class EnvironmentBuild:
    """Versions of an environment's torch, what that was built for, NCCL and the engine.

    `built_for` is `cpu` or a value of `TORCH_BUILDS`. Each of `others` is a name and a version.
    """

    torch: str
    built_for: str
    runtime: str
    others: tuple[str, ...]

    def __str__(self) -> str:
        built = f"{self.built_for} {self.runtime}".strip()
        return ", ".join([f"torch {self.torch} for {built}", *self.others])


def environments() -> dict[str, Path]:
    """Return the Python of each job environment that was created, by name."""
    found = {each.name: interpreter_of(each.name) for each in sorted(ENVIRONMENTS_DIR.glob("*"))}
    return {name: interpreter for name, interpreter in found.items() if interpreter is not None}


def build_of(
    interpreter: Path, engine: str, directory: Path | None = None
) -> EnvironmentBuild | None:
    """Read what an environment computes with; None if it has no torch.

    Distributions whose name has `engine` in it are listed. Libraries are in `directory`; None: in
    the environment's own.
    """
    places = [directory] if directory else _site_packages(interpreter)
    versions = next(
        (file for place in places if (file := place / "torch" / "version.py").is_file()), None
    )
    if versions is None:
        return None
    text = versions.read_text(encoding="utf-8")
    found = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '(.+)'$", text, re.MULTILINE))
    attribute = next((each for each in TORCH_BUILDS if each in found), None)
    others = []
    for each in metadata.distributions(path=list(map(str, places))):
        name = re.sub(r"[-_.]+", "-", each.name.lower())
        if name.startswith("nvidia-nccl-"):
            others.append(f"NCCL {each.version}")
        elif engine and engine in name:
            others.append(f"{name} {each.version}")
    return EnvironmentBuild(
        torch=found["__version__"],
        built_for=TORCH_BUILDS[attribute] if attribute else "cpu",
        runtime=found[attribute] if attribute else "",
        others=tuple(sorted(set(others))),
    )


def interpreter_of(environment: str) -> Path | None:
    """Return the path of a job environment's Python; None if the environment was not created."""
    python = ENVIRONMENTS_DIR / environment / "bin" / "python"
    return python if python.exists() else None


def is_inside() -> bool:
    """True if this process runs in a job environment."""
    return Path(sys.prefix).parent == ENVIRONMENTS_DIR


def installed_distributions(interpreter: Path) -> dict[str, str]:
    """Return the versions of all distributions of a virtual environment, by name, sorted."""
    found = metadata.distributions(path=list(map(str, _site_packages(interpreter))))
    return dict(sorted((entry.name, entry.version) for entry in found))


def _site_packages(interpreter: Path) -> list[Path]:
    return sorted(interpreter.parents[1].glob("lib/python*/site-packages"))
