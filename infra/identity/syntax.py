"""The syntax tree of a Python file, read without running it.

Promises: a file that is Python is parsed, whatever other threads of the process do meanwhile.
Does not promise: that the file's imports exist or that it runs.
"""

import ast
import contextlib
from pathlib import Path

_NUM_ATTEMPTS = 20


def parsed_file(path: Path) -> ast.Module:
    """Parse a file.

    Args:
        path: the file.

    Returns:
        ast.Module: its syntax tree.

    Raises:
        SyntaxError: the file is not Python.
        ValueError: the file holds null bytes, under Python before 3.11.4.
    """
    # Python before 3.11.8 and 3.12.1 counts the depth of the tree in one place for all threads.
    # It raises SystemError where two of them parse at once (CPython issue 106905). Each call of
    # `ast.parse` sets the count anew.
    for _ in range(_NUM_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(path.read_bytes(), filename=str(path))
    return ast.parse(path.read_bytes(), filename=str(path))
