"""The RL loop is a page that a researcher changes, and each part behind it is one more."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "engines" / "trainers"
LOOP = TRAINERS / "rl.py"
LOOP_FUNCTIONS = ("train_round", "_train_step")
MAX_LOOP_LINES, MAX_LOOP_PARTS, MAX_PART_LINES = 50, 10, 300
OURS = ("flows", "tasks", "engines", "hardware", "infra")


def imported(path: Path) -> list[str]:
    """Modules of ours that a file imports, one for each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found += [
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    ]
    return [name for name in found if name.split(".")[0] in OURS]


def parts() -> list[Path]:
    """The modules behind the loop: all that a step is made of, and what the loop imports."""
    of_loop = [ROOT / f"{name.replace('.', '/')}.py" for name in imported(LOOP)]
    of_trainers = [path for path in of_loop if path.is_relative_to(TRAINERS)]
    return sorted({*of_trainers})


def test_the_loop_is_a_page() -> None:
    tree = ast.parse(LOOP.read_text(encoding="utf-8"))
    loop = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in LOOP_FUNCTIONS
    ]
    assert [node.name for node in loop] == [*LOOP_FUNCTIONS]
    assert sum((node.end_lineno or 0) + 1 - node.lineno for node in loop) <= MAX_LOOP_LINES
    assert len(parts()) <= MAX_LOOP_PARTS


@pytest.mark.parametrize("path", parts(), ids=lambda path: path.name)
def test_a_part_is_short_and_says_in_one_sentence_what_it_does(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_PART_LINES
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    said = " ".join(first.split())
    assert said.endswith(".")
    assert said.count(". ") == 0
