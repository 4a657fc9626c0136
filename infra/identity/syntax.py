"""Parse a Python file without running it, safely among threads."""

import ast
import contextlib
from pathlib import Path

_NUM_ATTEMPTS = 20


def parsed_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raises SyntaxError or ValueError if it is not Python."""
    # Before 3.11.8 and 3.12.1, CPython shares the recursion depth of the parser among threads and
    # raises SystemError if two parse at once (CPython issue 106905). Each call resets the depth.
    for _ in range(_NUM_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(path.read_bytes(), filename=str(path))
    return ast.parse(path.read_bytes(), filename=str(path))
