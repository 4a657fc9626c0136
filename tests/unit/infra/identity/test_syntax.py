import ast
import gc
from pathlib import Path

import pytest

from infra.identity.fingerprint import parsed_file


def test_a_file_is_parsed_while_something_else_is_parsed(tmp_path: Path) -> None:
    # Collecting garbage amid `ast.parse` runs Python code, as a switch to another thread does.
    path = tmp_path / "many.py"
    path.write_text("\n".join(f"def f{i}(x): return [x + {i}, (x, x)]" for i in range(4000)))
    parsed_amid: list[ast.Module] = []

    def parse_another(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not parsed_amid:
            parsed_amid.append(ast.parse("f(g(h(1)))"))

    gc.callbacks.append(parse_another)
    try:
        tree = parsed_file(path)
    finally:
        gc.callbacks.remove(parse_another)
    assert parsed_amid
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [
        f"f{i}" for i in range(4000)
    ]


def test_what_is_not_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "not.py"
    path.write_text("def f(:")
    with pytest.raises(SyntaxError):
        parsed_file(path)
