"""Rules of the tree that no linter knows: sizes, names, unsafe calls, waits without a deadline."""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
JOBS = ROOT / "engines" / "jobs"
"""Where a stage's main lies, by the stage's name: as many as there are stages, yours included."""
HOMES = {
    "is registered by both": "infra/plugins.py",
    "error.errors(include_url=False)": "infra/field_errors.py",
    "def import_external_modules": "infra/plugins.py",
    "group_relative=True": "engines/config/rows.py",
    "the advantage would be 0": "engines/config/rules/algorithm.py",
    "need at most rl.sampling.max_new_tokens": "engines/config/rules/algorithm.py",
    "exceeds model.max_length": "engines/config/rules/batches.py",
    "is not a multiple of the": "engines/config/rules/batches.py",
    "is not a model directory": "engines/checkpoint/model_directory.py",
    "(pickle can run code)": "engines/checkpoint/model_directory.py",
    "need at most the model's vocabulary": "engines/data/read/tokenizer.py",
    "in engine.generate(": "engines/rollout/collect.py",
}
"""A rule, or what says it, and the one file that has it; everyone else asks there."""
BANNED_NAMES = ("utils", "common", "helpers", "manager", "misc")
UNSAFE_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "torch.load", "os.system"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_and_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    assert path.stem not in BANNED_NAMES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize(("words", "home"), HOMES.items())
def test_a_rule_has_one_home(words: str, home: str) -> None:
    found = [path for path in SOURCES if words in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(ROOT)) for path in found] == [home]


def test_no_unsafe_calls() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path in SOURCES
        for name, node in calls(path)
        if name in UNSAFE_CALLS
        or any(k.arg == "shell" and getattr(k.value, "value", None) is True for k in node.keywords)
        or any(
            k.arg == "trust_remote_code" and getattr(k.value, "value", None) is not False
            for k in node.keywords
        )
    ]
    assert not found


def test_every_ray_wait_has_a_deadline() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for name, node in calls(path)
        if name in {"ray.get", "ray.wait"} and "timeout" not in {k.arg for k in node.keywords}
    ]
    assert not found


def test_every_module_says_what_it_is_for() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not missing


def test_no_cycle_between_directories_of_one_floor() -> None:
    graph = grimp.build_graph(*PACKAGES)
    edges: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            here, there = room_of(graph, module), room_of(graph, imported)
            if here != there and here.partition(".")[0] == there.partition(".")[0]:
                edges.setdefault(here, set()).add(there)
    # Raises CycleError, which names the rooms on the way.
    graphlib.TopologicalSorter(edges).prepare()


def room_of(graph: grimp.ImportGraph, module: str) -> str:
    """The package a module lies in; a package, or a module of a floor itself, is its own room."""
    package = module.rpartition(".")[0]
    return module if graph.find_children(module) or package in PACKAGES else package


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found | {"rlhf.testing"}


def test_no_test_imports_ray_while_it_is_collected() -> None:
    """Ray reads once in a process whether it has to authenticate."""
    importing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^(import|from) ray\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not importing
