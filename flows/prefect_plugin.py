"""Lets `prefect deployment run NAME` mean `NAME/NAME`.

Prefect wants `<flow name>/<deployment name>` and offers no short form. This plugin, loaded by
Prefect through the entry-point group `prefect.plugins`, completes the name on the command line
before Prefect reads it. Names with a slash, and every other command, are left alone.
"""

import sys
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

from prefect.plugins import register_hook

_PROGRAMS = {"prefect", "__main__.py"}
_COMMAND = ["deployment", "run"]


@register_hook
def setup_environment(*, ctx: Any) -> None:  # noqa: ARG001  (Prefect's hook signature)
    """Complete the short name; this is Prefect's start-up hook."""
    complete_deployment_name(sys.argv)


def complete_deployment_name(argv: MutableSequence[str]) -> None:
    """Write `NAME/NAME` for the `NAME` of `prefect ... deployment run NAME`, in place."""
    if Path(argv[0] if argv else "").name not in _PROGRAMS:
        return
    for at in range(1, len(argv) - 2):
        if list(argv[at : at + 2]) == _COMMAND:
            name = argv[at + 2]
            if not name.startswith("-") and "/" not in name:
                argv[at + 2] = f"{name}/{name}"
            return
