"""How large the project is, by package, at two commits.

    python tests/tree/project_size.py [--before COMMIT]

A statement is a node of the syntax tree; docstrings are none. Documentation is the lines of
docstrings and of comments that stand alone. A function's length counts its docstring.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
BEFORE = "b916653"
BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True)
class Size:
    """Counts over some files.

    Attributes:
        function_lines: length of each function, ascending.
    """

    num_files: int
    num_lines: int
    num_doc_lines: int
    num_statements: int
    num_broad_excepts: int
    function_lines: tuple[int, ...]

    @property
    def doc_share(self) -> float:
        """Documentation's part of all lines."""
        return self.num_doc_lines / max(self.num_lines, 1)

    @property
    def function_p90(self) -> int:
        """Length that nine of ten functions do not exceed."""
        return self.function_lines[(len(self.function_lines) * 9) // 10]


def size_of(sources: Iterable[str]) -> Size:
    """Measure the texts of some files."""
    texts = list(sources)
    num_doc_lines = num_statements = num_broad = 0
    functions: list[int] = []
    for text in texts:
        nodes = list(ast.walk(ast.parse(text)))
        documented = {line for node in nodes if is_text(node) for line in lines_of(node)}
        num_doc_lines += len(documented | comment_lines(text))
        num_statements += sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)
        num_broad += sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in nodes)
        functions += [
            len(lines_of(node))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    num_lines = sum(len(text.splitlines()) for text in texts)
    lengths = tuple(sorted(functions))
    return Size(len(texts), num_lines, num_doc_lines, num_statements, num_broad, lengths)


def is_text(node: ast.AST) -> bool:
    """True for a statement that is nothing but a string: a docstring."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_broad(handler: ast.ExceptHandler) -> bool:
    """True for an `except` that catches every error."""
    names = [node.id for node in ast.walk(handler.type or handler) if isinstance(node, ast.Name)]
    return handler.type is None or bool(BROAD & set(names))


def lines_of(node: ast.AST) -> range:
    """Line numbers of a statement."""
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def comment_lines(text: str) -> set[int]:
    """Line numbers of comments that stand alone."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }


def sources_now() -> Iterator[tuple[str, str]]:
    """Yield path and text of every source file as it is now."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def sources_at(commit: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every source file of a commit."""
    for name in git("ls-tree", "-r", "--name-only", commit, "--", *PACKAGES).splitlines():
        if name.endswith(".py"):
            yield name, git("show", f"{commit}:{name}")


def git(*arguments: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def by_package(sources: Iterable[tuple[str, str]]) -> Mapping[str, Size]:
    """Measure each package, and all of them."""
    found = list(sources)
    of = {
        package: size_of(text for name, text in found if name.startswith(f"{package}/"))
        for package in PACKAGES
    }
    return {**of, "all": size_of(text for _, text in found)}


def main() -> None:
    """Print a table of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", default=BEFORE)
    before = parser.parse_args().before
    print(f"{'package':<9} {'at':<8} files  lines  stmts   doc  p90  max broad")
    sizes = {before: by_package(sources_at(before)), "now": by_package(sources_now())}
    for package in (*PACKAGES, "all"):
        for at, size in sizes.items():
            it = size[package]
            print(
                f"{package:<9} {at:<8} {it.num_files:>5} {it.num_lines:>6} {it.num_statements:>6}"
                f" {it.doc_share:>5.1%} {it.function_p90:>4} {it.function_lines[-1]:>4}"
                f" {it.num_broad_excepts:>5}"
            )


if __name__ == "__main__":
    main()
