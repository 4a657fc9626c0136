"""Asks a child process that loads what this process must not: torch, plugins, users' rewards.

Promises: an answer of the stated type, or an error of one line, within the deadline.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from infra import env
from infra.errors import ServiceError

AnswerT = TypeVar("AnswerT", bound=BaseModel)


def ask(
    answer: type[AnswerT], what: str, deadline_s: float, command: Sequence[str], text: str = ""
) -> AnswerT:
    """Run a module of this project and parse its last line of output as JSON.

    `command` is the module's name and arguments, `text` its standard input.

    Raises:
        ServiceError: it gave no valid answer in time.
    """
    try:
        ended = subprocess.run(
            # -P keeps the current directory off the import path.
            [sys.executable, "-P", "-m", *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env=env.child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{what} took over {deadline_s:g} s") from None
    try:
        return answer.model_validate_json((ended.stdout.splitlines() or [""])[-1])
    except ValidationError:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ServiceError(f"{what} failed: {last}") from None
