"""A question to a child process: torch and the user's code are not for the control plane.

Promises: an answer of the expected form, or one line that says why there is none.
"""

import subprocess
import sys
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from infra import env
from infra.errors import ServiceError

Answer = TypeVar("Answer", bound=BaseModel)


def ask(
    what: str,
    deadline_s: float,
    answer: type[Answer],
    module: str,
    *arguments: str,
    question: str = "",
) -> Answer:
    """Run a module and read the last line that it prints.

    Args:
        what: is done, in words, for the error.
        deadline_s: for all of it.
        answer: form of that line, as JSON.
        module: to run.
        *arguments: of its command line.
        question: what it reads.

    Returns:
        The answer.

    Raises:
        ServiceError: there is none.
    """
    try:
        ended = subprocess.run(
            # -P: what lies in the current directory is not installed.
            [sys.executable, "-P", "-m", module, *arguments],
            input=question,
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
