"""Result of one check of `rlhf doctor`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from infra.errors import PipelineError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """Result of one check; `error` means that the pipeline cannot run."""

    name: str
    status: Status
    detail: str


def tried(name: str, find: Callable[[], str]) -> Check:
    """Return a check with what `find` returns, or with its error."""
    try:
        return Check(name, "ok", find())
    except (PipelineError, OSError) as error:
        return Check(name, "error", str(error))
