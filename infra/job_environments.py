"""Virtual environments of jobs whose libraries clash with the project's own, or that few need.

`make env-<name>` makes one under `.envs/` of the checkout, from `infra/locks/<name>.lock`.
Promises: looking for one imports nothing and starts no process; what is installed in it can be
told without it running.
Does not promise that another machine of the cluster has it: it must be at the same path there.
"""

import sys
from importlib import metadata
from pathlib import Path

ENVIRONMENTS_DIR = Path(__file__).resolve().parents[1] / ".envs"


def interpreter_of(environment: str) -> Path | None:
    """The Python of a job environment.

    Args:
        environment: its name.

    Returns:
        Path of the program; None when the environment was not made.
    """
    python = ENVIRONMENTS_DIR / environment / "bin" / "python"
    return python if python.exists() else None


def is_inside() -> bool:
    """Whether this process runs in a job environment."""
    return Path(sys.prefix).parent == ENVIRONMENTS_DIR


def installed_distributions(interpreter: Path) -> dict[str, str]:
    """What is installed beside an interpreter.

    Args:
        interpreter: of a virtual environment.

    Returns:
        Versions by distribution name, sorted.
    """
    site_packages = sorted(interpreter.parents[1].glob("lib/python*/site-packages"))
    found = metadata.distributions(path=[str(path) for path in site_packages])
    return dict(sorted((entry.name, entry.version) for entry in found))
