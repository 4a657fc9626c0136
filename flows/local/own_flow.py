"""Runs a flow from a Python file in this process and shows it on the terminal.

Promises: the file is executed once, as Prefect's worker does for a deployment, and can import what
`python FILE` could. Does not promise that the flow uses the stages of this project.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect.flows import Flow
from rich.console import Console

from flows.local.embedded_prefect import PrefectServer
from flows.local.local_run import print_report, watched
from flows.report.report import Report
from flows.run.lazy_cluster import LazyCluster
from infra.errors import ConfigError


def run_own_flow(
    entrypoint: str, overrides: Sequence[str], home: Path, console: Console, prefect: PrefectServer
) -> None:
    """Run the flow, and print its result if that is a `Report`; `overrides` is its argument.

    Raises:
        ConfigError: there is no such flow, or it refused its recipe.
    """
    own = load_own_flow(entrypoint)
    with watched(LazyCluster(home), console, prefect):
        report = own(list(overrides)) if overrides else own()
    if isinstance(report, Report):
        print_report(report, home, console)


def load_own_flow(entrypoint: str) -> Flow[..., Any]:
    """Load the flow of a Python file with one flow, or of `FILE:FLOW`.

    Raises:
        ConfigError: there is no such file or flow.
    """
    path, _, name = entrypoint.partition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError("FLOW", f"got {path!r}; need a Python file; there is none")
    found = {key: thing for key, thing in vars(_executed(file)).items() if isinstance(thing, Flow)}
    if name in found:
        return found[name]
    if name or len(found) != 1:
        flows = ", ".join(found) or "none"
        raise ConfigError(
            "FLOW", f"got {entrypoint!r}; its flows are: {flows}; name one, as in {path}:my_flow"
        )
    return next(iter(found.values()))


def _executed(file: Path) -> ModuleType:
    """Execute a file as a module that can import its neighbours."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError("FLOW", f"got {file.name!r}; need a Python file, which ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module
