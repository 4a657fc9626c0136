"""Asks a child process what this one must not load itself: torch, a plugin, a user's reward.

Promises: an answer of the stated type, or one line within the deadline.
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
    """Run one of our modules to its end.

    Args:
        answer: what its last line is, as JSON.
        what: it does, for errors.

    Raises:
        ServiceError: it gave none in time.
    """
    try:
        ended = subprocess.run(
            # -P: what lies in the current directory is not installed.
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
