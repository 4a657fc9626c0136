"""Virtual environments of jobs whose libraries conflict with the project's, or are rarely needed.

`make env-<name>` creates one in `.envs/` of the checkout from `infra/locks/<device>/<name>.lock`.
Each machine of a cluster needs it at the same path. No function here starts an interpreter.
"""

import sys
from importlib import metadata
from pathlib import Path

ENVIRONMENTS_DIR = Path(__file__).resolve().parents[1] / ".envs"


def interpreter_of(environment: str) -> Path | None:
    """Return the path of a job environment's Python; None if the environment was not created."""
    python = ENVIRONMENTS_DIR / environment / "bin" / "python"
    return python if python.exists() else None


def is_inside() -> bool:
    """True if this process runs in a job environment."""
    return Path(sys.prefix).parent == ENVIRONMENTS_DIR


def installed_distributions(interpreter: Path) -> dict[str, str]:
    """Return the versions of all distributions of a virtual environment, by name, sorted."""
    site_packages = map(str, sorted(interpreter.parents[1].glob("lib/python*/site-packages")))
    found = metadata.distributions(path=list(site_packages))
    return dict(sorted((entry.name, entry.version) for entry in found))
