"""The fingerprint of a stage: one digest over everything that can change its output.

Promises: equal (stage, schema version, configuration, input digests, seed, sources, environment)
give equal fingerprints on every machine, and a change of any of them another one. Sources are the
bytes of this project's modules that the job's modules reach by `import` statements. They are parsed
and not executed, so that the control plane needs no job libraries.
Does not promise: to follow modules imported by name at run time (a registry's "module:Class").
The caller passes the modules of the chosen plugins as further roots.
"""

import ast
import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from platform import python_version_tuple
from typing import Any

from infra.errors import ConfigError
from infra.job_environments import installed_distributions
from infra.plugins import Row, external_modules, import_external_modules, outside_rows
from infra.store.canonical import sha256_file, sha256_json
from infra.store.stage_spec import Artifact, NextStage, some

OUR_PACKAGES = ("engines", "flows", "hardware", "infra", "tasks")
_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_FILE_PREFIX = "file:"


def stage_identity(
    stage: str,
    schema_version: int,
    config: Any,
    inputs: Mapping[str, Artifact],
    seed: int,
    sources_digest: str,
    environment_digest: str,
) -> dict[str, Any]:
    """Return the identity of a stage as plain JSON values; their sha256 is the fingerprint.

    `schema_version` is raised when the layout of the output changes. `config` is the part of the
    resolved configuration that counts, as plain JSON values.
    """
    return {
        "stage": stage,
        "schema_version": schema_version,
        "config": config,
        "inputs": {name: artifact.digest for name, artifact in inputs.items()},
        "seed": seed,
        "sources": sources_digest,
        "environment": environment_digest,
    }


def next_fingerprint(stage: NextStage, output: Artifact) -> str:
    """Return the fingerprint of a stage whose last input was just produced."""
    inputs = {**stage.identity["inputs"], output.kind: output.digest}
    return sha256_json({**stage.identity, "inputs": inputs})


def source_closure(
    modules: Sequence[str],
    packages: Sequence[str] = OUR_PACKAGES,
    counts: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
) -> dict[str, str]:
    """Return the sha256 of every module that importing some modules can execute, by sorted name.

    Imports inside functions count, those under `if TYPE_CHECKING:` do not. Parent packages count.

    Args:
        modules: dotted names, or paths that end in `.py` (their key is `file:<name>`).
        packages: imports are followed into these top-level packages and those of `modules`.
        counts: returns False for a reached module to leave out and not to follow. Roots always
            count.

    Raises:
        ConfigError: a root does not exist, or a reached file is not Python.
    """
    roots = {name.partition(".")[0] for name in modules if not name.endswith(".py")}
    followed = {*packages, *roots}

    def executed(name: str) -> Iterable[_Source]:
        found = _executed_by(name) if name.partition(".")[0] in followed else ()
        return (each for each in found if counts(each.name))

    reached = _reached((source for name in modules for source in _root_sources(name)), executed)
    return dict(sorted((source.name, sha256_file(source.path)) for source in reached))


def refuse_changed_code(sources: Mapping[str, str], libraries: Mapping[str, str | None]) -> None:
    """Raise ConfigError if the code here is not the code from which a fingerprint was computed.

    The arguments are the results of `source_closure` and `installed_libraries` at planning time. A
    new module needs no check: the module that imports it has changed.
    """
    modules = [name for name, digest in sources.items() if _digest_here(name) != digest]
    versions = [
        f"{name} {_installed_version(name)} for {version}"
        for name, version in libraries.items()
        if _installed_version(name) != version
    ]
    for what, changed in (("sources", modules), ("environment", versions)):
        if changed:
            raise ConfigError(
                what,
                f"this job would run other code than it was planned with: {some(changed)}; run "
                "again, from a new process and with the same checkout on every machine",
            )


def refuse_other_libraries(planned: Mapping[str, str | None], interpreter: Path, who: str) -> None:
    """Raise ConfigError if a job environment does not have the planned `installed_libraries`.

    `who` is what runs in the environment, for the error.
    """
    here = installed_distributions(interpreter)
    changed = [
        f"{name} {here.get(name)} for {planned.get(name)}"
        for name in sorted({*planned, *here})
        if here.get(name) != planned.get(name)
    ]
    if changed:
        raise ConfigError(
            "environment",
            f"{who} would run other libraries than were planned with: {some(changed)}; make "
            f"env-{interpreter.parents[1].name} on every machine, and run again",
        )


def _digest_here(module: str) -> str | None:
    path = module_file(module)
    return sha256_file(path) if path is not None and path.is_file() else None


def installed_libraries(
    distributions: Sequence[str], interpreter: Path | None = None
) -> dict[str, str | None]:
    """Return the version of each distribution; None where it is not installed.

    With the `interpreter` of a job environment, return all distributions installed there instead.
    """
    if interpreter is not None:
        return {**installed_distributions(interpreter)}
    return {name: _installed_version(name) for name in distributions}


def environment_digest(
    distributions: Sequence[str],
    outside: Mapping[str, Any] | None = None,
    interpreter: Path | None = None,
) -> str:
    """Return the sha256 of Python's minor version, `installed_libraries` and `outside_code`."""
    environment: dict[str, Any] = {
        "python": ".".join(python_version_tuple()[:2]),
        "distributions": installed_libraries(distributions, interpreter),
    }
    return sha256_json({**environment, "outside": outside} if outside else environment)


def outside_code(named: Sequence[Row] = ()) -> dict[str, Any]:
    """Return owners and source digests of the external code that a stage may run, as JSON values.

    This covers the plugins of the rows in `named`, and listed modules that register nothing, since
    those may change anything. Sources count besides the version, because an editable installation
    changes without one. A module that cannot be found or read has no digest: a broken plugin may
    only stop its users. Listed modules that fail to import are named, so that repairing one changes
    the result. Empty if there is no such code.
    """
    outside = [row for _, row in outside_rows()]
    asked = {(row.name, row.target) for row in named}
    rows = [row for row in outside if (row.name, row.target) in asked]
    silent = external_modules().keys() - {row.registrar for row in outside}
    modules = silent.union(*(row.modules for row in rows))
    if not modules:
        return {}
    code: dict[str, Any] = {
        "owners": sorted({row.owner for row in rows}),
        "sources": {module: _own_sources_digest(module) for module in sorted(modules)},
    }
    broken = sorted(module.name for module in import_external_modules())
    return {**code, "broken": broken} if broken else code


def script_files(script: Path) -> dict[str, Path]:
    """Return a script and the modules in its directory that it can import, by sorted relative path.

    Raises ConfigError if one of them is not Python.
    """
    folder = script.parent

    def executed(name: str) -> Iterable[_Source]:
        return () if name.partition(".")[0] in OUR_PACKAGES else _executed_by(name, folder)

    reached = _reached([_Source(script.stem, script)], executed)
    return dict(sorted((each.path.relative_to(folder).as_posix(), each.path) for each in reached))


def project_modules(script: Path) -> set[str]:
    """Return the existing modules of this project that a script, or a file beside it, imports."""
    names = {
        name
        for path in script_files(script).values()
        for name in imported_modules(path.stem, path)
        if name.partition(".")[0] in OUR_PACKAGES
    }
    return {name for name in names if (file := module_file(name)) and file.is_file()}


def imported_modules(module: str, path: Path) -> tuple[str, ...]:
    """Return the sorted absolute names that a module may import.

    `a.b` of `from a import b` may turn out to be no module. `module` is the dotted name of the
    file, to resolve relative imports. Raises ConfigError if the file is not Python.
    """
    return _Source(module, path).imports


def _own_sources_digest(module: str) -> str | None:
    try:
        return sha256_json(source_closure([module], packages=()))
    except ConfigError:
        return None


@dataclass(frozen=True)
class _Source:
    name: str
    path: Path

    @property
    def package(self) -> str:
        """Package that relative imports start from."""
        is_package = self.path.name == "__init__.py"
        return self.name if is_package else self.name.rpartition(".")[0]

    @property
    def imports(self) -> tuple[str, ...]:
        """Sorted absolute names that it may import."""
        status = self.path.stat()
        return _parsed_imports(self, status.st_mtime_ns, status.st_size)


def _reached(
    roots: Iterable[_Source], executed: Callable[[str], Iterable[_Source]]
) -> set[_Source]:
    """Return the roots and all sources that their imports reach; `executed` resolves one name."""
    reached: set[_Source] = set()
    pending = set(roots)
    while pending:
        reached |= pending
        imported = {name for source in pending for name in source.imports}
        pending = {source for name in imported for source in executed(name)} - reached
    return reached


def _root_sources(name: str) -> list[_Source]:
    if name.endswith(".py"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise ConfigError(name, f"{path} is no file; need a Python file")
        return [_Source(_FILE_PREFIX + path.name, path)]
    if module_file(name) is None:
        raise ConfigError(name, "no such module; install the package that holds it")
    return list(_executed_by(name))


def _executed_by(name: str, directory: Path | None = None) -> Iterator[_Source]:
    """Yield a module and its parent packages, in a directory or (None) where imports find them."""
    for module in accumulate(name.split("."), "{}.{}".format):
        path = _file_at(directory, module.split(".")) if directory else module_file(module)
        if path is not None and path.is_file():
            yield _Source(module, path)


def _file_at(directory: Path, parts: Sequence[str]) -> Path | None:
    base = directory.joinpath(*parts)
    paths = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((path for path in paths if path.is_file()), None)


def module_file(name: str) -> Path | None:
    """Return the file of a module, or the directory of a namespace package; imports nothing."""
    top, *rest = name.split(".")
    directories = [_PROJECT_ROOT / top]
    if top not in OUR_PACKAGES or not directories[0].is_dir():
        spec = None
        with contextlib.suppress(ValueError):  # put into sys.modules by hand, without a spec
            spec = importlib.util.find_spec(top)  # imports nothing for a name without dots
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return Path(spec.origin) if spec.has_location and spec.origin and not rest else None
        directories = [Path(place) for place in spec.submodule_search_locations]
    for directory in directories:
        base = directory.joinpath(*rest)
        if found := _file_at(directory, rest) or (base if base.is_dir() else None):
            return found
    return None


def parsed_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raises SyntaxError or ValueError if it is not Python."""
    # Before 3.11.8 and 3.12.1, CPython shares the recursion depth of the parser among threads and
    # raises SystemError if two parse at once (CPython issue 106905). Each call resets the depth.
    for _ in range(20 - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(path.read_bytes(), filename=str(path))
    return ast.parse(path.read_bytes(), filename=str(path))


@functools.lru_cache(maxsize=4096)
def _parsed_imports(source: _Source, mtime_ns: int, size_bytes: int) -> tuple[str, ...]:
    """Return imported names, cached by time and size, so that an edited file is parsed again."""
    try:
        tree = parsed_file(source.path)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(str(source.path), f"not Python: {error}") from error
    names: set[str] = set()
    for node in _executed_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (base := _absolute_base(node, source.package)):
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    return tuple(sorted(names))


def _absolute_base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])]) if package else ""


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        test = child.test if isinstance(child, ast.If) else None
        is_skipped = "TYPE_CHECKING" in {getattr(test, "attr", ""), getattr(test, "id", "")}
        for executed in getattr(child, "orelse", ()) if is_skipped else [child]:
            yield executed
            yield from _executed_nodes(executed)


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
