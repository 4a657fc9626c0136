"""The identity of a stage: one digest over everything that can change what it yields.

Promises: equal (stage, schema version, configuration, input digests, seed, sources, environment)
give an equal fingerprint on every machine, and a change of any of them another one.
Sources are the bytes of our modules that the job's modules reach by `import` statements, read
with `ast` and never executed, so that the control plane needs none of the job's libraries.
Does not promise: to follow what is imported by name at run time (a registry's "module:Class").
The caller passes the modules of the chosen plugins as further roots.
"""

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from platform import python_version_tuple
from typing import Any

from infra.errors import ConfigError
from infra.identity.syntax import parsed_file
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
    """What makes a stage the stage it is.

    Args:
        stage: its name.
        schema_version: of the stage; raised when its output changes its layout.
        config: what counts of the resolved configuration, as plain JSON values.
        inputs: by name; only their digests count, not where they lie or who made them.
        seed: of all randomness in the stage.
        sources_digest: of `sources_digest`.
        environment_digest: of `environment_digest`.

    Returns:
        Plain JSON values; their sha256 is the fingerprint.
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
    """The fingerprint of a stage whose last input was just made."""
    inputs = {**stage.identity["inputs"], output.kind: output.digest}
    return sha256_json({**stage.identity, "inputs": inputs})


def source_closure(
    modules: Sequence[str],
    packages: Sequence[str] = OUR_PACKAGES,
    counts: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
) -> dict[str, str]:
    """Every module of ours that importing some modules can execute.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not. The `__init__` of
    every package on the way counts, since an import executes it.

    Args:
        modules: dotted names, or paths that end in `.py` (their key is `file:<name>`).
        packages: imports are followed into these top-level packages, and into those of
            `modules`; everything else is the environment's.
        counts: whether a reached module is one that can change a number; what does not count is
            not followed either. Roots always count.

    Returns:
        sha256 of each file by module name, sorted.

    Raises:
        ConfigError: a root does not exist, or a reached file is not Python.
    """
    roots = [name for name in modules if not name.endswith(".py")]
    followed = {*packages, *(name.partition(".")[0] for name in roots)}

    def executed(name: str) -> Iterable[_Source]:
        if name.partition(".")[0] not in followed:
            return ()
        return (each for each in _executed_by(name) if counts(each.name))

    reached = _reached((source for name in modules for source in _root_sources(name)), executed)
    return dict(sorted((source.name, sha256_file(source.path)) for source in reached))


def refuse_changed_code(sources: Mapping[str, str], libraries: Mapping[str, str | None]) -> None:
    """Refuse to compute under a fingerprint that was made from other code than is here.

    A module that was added is imported by one that changed.

    Args:
        sources: of `source_closure`, perhaps of another machine or an earlier time.
        libraries: of `installed_libraries`, of the same.

    Raises:
        ConfigError: names the modules or distributions.
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
    """Refuse to compute beside other libraries than a fingerprint was made from.

    Args:
        planned: of `installed_libraries`, perhaps of another machine or an earlier time.
        interpreter: of the job environment that they are in.
        who: would run them.

    Raises:
        ConfigError: names the distributions.
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
    """Versions of what can change what a job computes.

    Args:
        distributions: by name.
        interpreter: of the job environment that the job runs in: all that is installed there
            counts instead. None: it runs in this one.

    Returns:
        Version by name; None where it is not installed.
    """
    if interpreter is not None:
        return {**installed_distributions(interpreter)}
    return {name: _installed_version(name) for name in distributions}


def environment_digest(
    distributions: Sequence[str],
    outside: Mapping[str, Any] | None = None,
    interpreter: Path | None = None,
) -> str:
    """sha256 of Python's minor version, the installed versions of distributions, and plugins.

    Args:
        distributions: by name; one that is not installed counts as absent.
        outside: of `outside_code`; None or empty where no plugin is installed.
        interpreter: of the job environment that the job runs in: all that is installed there
            counts instead. None: it runs in this one.

    Returns:
        64 hex digits.
    """
    environment: dict[str, Any] = {
        "python": ".".join(python_version_tuple()[:2]),
        "distributions": installed_libraries(distributions, interpreter),
    }
    if outside:
        environment["outside"] = dict(outside)
    return sha256_json(environment)


def outside_code(named: Sequence[Row] = ()) -> dict[str, Any]:
    """What identifies the code of other people that a stage may run; empty without any.

    That is the parts that its configuration names, and modules
    that are imported and register nothing: they may change anything. A module that registers
    parts counts for those who name one of them. A version alone would miss an editable
    installation: the sources of each one's own package that its module reaches count too. A module
    that cannot be found or read counts as absent, since a broken plugin may only stop whoever asks
    for it. A listed module that cannot be imported is another identity than the same one repaired,
    even if only its surroundings were.

    Args:
        named: rows that the stage's configuration names.

    Returns:
        Owners and source digests, as plain JSON values.
    """
    outside = outside_rows()
    registrars = {row.registrar for _, row in outside}
    asked = {(row.name, row.target) for row in named}
    rows = [row for _, row in outside if (row.name, row.target) in asked]
    silent = {module for module in external_modules() if module not in registrars}
    modules = silent | {name for row in rows for name in row.modules}
    if not modules:
        return {}
    code: dict[str, Any] = {
        "owners": sorted({row.owner for row in rows}),
        "sources": {module: _own_sources_digest(module) for module in sorted(modules)},
    }
    broken = sorted(module.name for module in import_external_modules())
    return {**code, "broken": broken} if broken else code


def script_files(script: Path) -> dict[str, Path]:
    """A user's Python file, and every module beside it that importing it can execute.

    Args:
        script: imports are looked for in its directory, as Python does for a script; what is not
            found there belongs to the environment.

    Returns:
        Paths by name relative to that directory, sorted.

    Raises:
        ConfigError: one of them is not Python.
    """
    folder = script.parent

    def executed(name: str) -> Iterable[_Source]:
        return () if name.partition(".")[0] in OUR_PACKAGES else _beside(folder, name)

    reached = _reached([_Source(script.stem, script)], executed)
    return dict(sorted((each.path.relative_to(folder).as_posix(), each.path) for each in reached))


def project_modules(script: Path) -> set[str]:
    """Modules of this project that a user's Python file, or one beside it, imports.

    Args:
        script: the file.

    Returns:
        Dotted names of modules that exist.
    """
    names = {
        name
        for path in script_files(script).values()
        for name in _imported_names(_Source(path.stem, path))
        if name.partition(".")[0] in OUR_PACKAGES
    }
    return {name for name in names if (file := module_file(name)) and file.is_file()}


def imported_modules(module: str, path: Path) -> tuple[str, ...]:
    """Absolute names that a module may import.

    Args:
        module: its dotted name, from which relative imports start.
        path: its file.

    Returns:
        Names, sorted; `a.b` of `from a import b` may turn out to be no module.

    Raises:
        ConfigError: it is not Python.
    """
    return _imported_names(_Source(module, path))


def _own_sources_digest(module: str) -> str | None:
    try:
        return sha256_json(source_closure([module], packages=()))
    except ConfigError:
        return None


@dataclass(frozen=True)
class _Source:
    """One module and its file."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """What a relative import in it starts from."""
        if self.path.name == "__init__.py":
            return self.name
        return self.name.rpartition(".")[0]


def _reached(
    roots: Iterable[_Source], executed: Callable[[str], Iterable[_Source]]
) -> set[_Source]:
    """Sources and all that importing them executes, of which `executed` tells for one name."""
    reached: set[_Source] = set()
    pending = [*roots]
    while pending:
        source = pending.pop()
        if source not in reached:
            reached.add(source)
            for name in _imported_names(source):
                pending.extend(executed(name))
    return reached


def _root_sources(name: str) -> list[_Source]:
    if name.endswith(".py"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise ConfigError(name, f"{path} does not exist; give another path")
        return [_Source(_FILE_PREFIX + path.name, path)]
    if module_file(name) is None:
        raise ConfigError(name, "no such module; install the package that holds it")
    return list(_executed_by(name))


def _executed_by(name: str) -> Iterator[_Source]:
    """The sources that `import name` executes: its packages from the top, then itself."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        path = module_file(module)
        if path is not None and path.is_file():
            yield _Source(module, path)


def _beside(directory: Path, name: str) -> Iterator[_Source]:
    """The files below a directory that `import name` executes."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        base = directory.joinpath(*parts[:length])
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file():
                yield _Source(".".join(parts[:length]), path)
                break


def module_file(name: str) -> Path | None:
    """The file of a module, or the directory of a namespace package; nothing is imported."""
    top, *rest = name.split(".")
    for directory in _package_directories(top):
        base = directory.joinpath(*rest)
        candidates = (base / "__init__.py", base.with_name(f"{base.name}.py") if rest else base)
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        if base.is_dir():
            return base
    return _single_file(top) if not rest else None


def _package_directories(top: str) -> list[Path]:
    """Where a top-level package lies: ours beside this one, others where Python finds them."""
    ours = _PROJECT_ROOT / top
    if top in OUR_PACKAGES and ours.is_dir():
        return [ours]
    spec = _top_level_spec(top)
    locations = spec.submodule_search_locations if spec else None
    return [Path(location) for location in locations or ()]


def _single_file(top: str) -> Path | None:
    """The file of a top-level module that is no package."""
    spec = _top_level_spec(top)
    if spec is None or spec.submodule_search_locations is not None or not spec.has_location:
        return None
    return Path(spec.origin) if spec.origin else None


def _top_level_spec(top: str) -> Any:
    # For a name without dots, `find_spec` looks without importing anything.
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module put into sys.modules by hand, without a spec
        return None


def _imported_names(source: _Source) -> tuple[str, ...]:
    status = source.path.stat()
    return _parsed_imports(source, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _parsed_imports(source: _Source, mtime_ns: int, size_bytes: int) -> tuple[str, ...]:
    """Absolute names a file may import; `a.b` of `from a import b` may turn out to be no module.

    `mtime_ns` and `size_bytes` only make an edited file a new key.
    """
    try:
        tree = parsed_file(source.path)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(str(source.path), f"not Python: {error}") from error
    names: set[str] = set()
    for node in _executed_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_base(node, source.package)
            if base:
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    return tuple(sorted(names))


def _absolute_base(node: ast.ImportFrom, package: str) -> str:
    """The module that `from ... import` names, without leading dots; empty if there is none."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])]) if package else ""


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, except the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from _executed_nodes(other)
            continue
        yield child
        yield from _executed_nodes(child)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
