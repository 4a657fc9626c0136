"""A user's script as an input of a stage: its files, and the outside code that it imports.

Promises: an edit of the script, or of an imported module beside it, changes the digest; a job
runs a copy with the planned digest. Outside this project and that directory, an installed
distribution counts by its version. A package that is read in place (`pip install -e`, a `.pth`
file, `PYTHONPATH`, or without any distribution) counts by the bytes of every module that the script
reaches, and its imports count likewise. Nothing is imported.
Does not promise: to notice manual edits below `site-packages`, data files (pass their paths as
arguments of the script), dependencies of an installed distribution, or imports by a name computed
at run time.
"""

import json
import shutil
import site
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from infra.errors import ConfigError
from infra.identity.fingerprint import (
    OUR_PACKAGES,
    imported_modules,
    module_file,
    script_files,
    source_closure,
)
from infra.store.artifacts import FileEntry, Manifest, build_manifest
from infra.store.canonical import sha256_file
from infra.store.stage_spec import Artifact

SCRIPT_KIND = "script"


@dataclass(frozen=True)
class ImportedCode:
    """External code of scripts: sha256 by module of sources read in place, and distributions."""

    sources: dict[str, str]
    distributions: tuple[str, ...]


def imported_code(scripts: Iterable[Path]) -> ImportedCode:
    """Return the external code that scripts import, directly or through modules beside them.

    A module that is not found is left out. Raises ConfigError if a script is not Python.
    """
    sources: dict[str, str] = {}
    distributions: set[str] = set()
    pending = {name for script in scripts for name in _imports_of(script)}
    seen: set[str] = set()
    inside = {*OUR_PACKAGES, *sys.stdlib_module_names}
    while pending:
        name = pending.pop()
        if name in seen or name.partition(".")[0] in inside:
            continue
        seen.add(name)
        installed = _distributions(name)
        distributions.update(installed)
        if installed and not _is_read_in_place(name):
            continue
        for module, digest in _own_sources(name).items():
            sources[module] = digest
            if file := module_file(module):
                with suppress(ConfigError):  # syntax of another Python version
                    pending.update(imported_modules(module, file))
    return ImportedCode(dict(sorted(sources.items())), tuple(sorted(distributions)))


def _imports_of(script: Path) -> set[str]:
    files = script_files(script)
    beside = {Path(name).parts[0].removesuffix(".py") for name in files}
    names = {name for path in files.values() for name in imported_modules(path.stem, path)}
    return {name for name in names if name.partition(".")[0] not in beside}


def _own_sources(name: str) -> dict[str, str]:
    """Return the sha256 by module of what an import executes in its own package; may be empty."""
    root, file = name, module_file(name)
    while file is None and "." in root:  # `b` of `from a import b` may be no module
        root = root.rpartition(".")[0]
        file = module_file(root)
    if file is None:
        return {}
    try:
        return source_closure([root], packages=())
    except ConfigError:  # some reachable file has syntax of another Python version
        return {root: sha256_file(file)} if file.is_file() else {}


def _distributions(name: str) -> list[str]:
    top = name.partition(".")[0]
    return [each for each in _by_package().get(top, ()) if not _is_editable(each)]


def _is_read_in_place(name: str) -> bool:
    """True if a package, or a part of it, is read in place and so may be edited."""
    top = name.partition(".")[0]
    if any(map(_is_editable, _by_package().get(top, ()))):
        return True
    file = module_file(top)
    return file is not None and not any(file.is_relative_to(each) for each in _site_directories())


@cache
def _by_package() -> dict[str, frozenset[str]]:
    return {name: frozenset(found) for name, found in metadata.packages_distributions().items()}


@cache
def _is_editable(distribution: str) -> bool:
    text = metadata.distribution(distribution).read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


@cache
def _site_directories() -> tuple[Path, ...]:
    places = {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(path for place in sorted(places) for path in {Path(place), Path(place).resolve()})


def script_artifact(script: Path, field: str) -> Artifact:
    """Return an artifact of kind `script` whose uri is the absolute path of the file.

    Raises:
        ConfigError: the file does not exist, or a file that it reaches is not Python.
    """
    script = script.expanduser().absolute()
    if not script.is_file():
        raise ConfigError(field, f"{script} is no file (cwd is {Path.cwd()}); need a Python file")
    files = {
        name: FileEntry(size_bytes=path.stat().st_size, sha256=sha256_file(path))
        for name, path in script_files(script).items()
    }
    digest = Manifest(kind=SCRIPT_KIND, files=files).digest
    return Artifact(kind=SCRIPT_KIND, uri=str(script), digest=digest)


def copy_script(artifact: Artifact, target: Path, field: str) -> None:
    """Replace `target` by a copy of a `script_artifact`'s files.

    Raises:
        ConfigError: a file no longer has the planned digest; names the configuration `field`.
    """
    shutil.rmtree(target, ignore_errors=True)
    for name, path in script_files(Path(artifact.uri)).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
    if build_manifest(target, SCRIPT_KIND).digest != artifact.digest:
        raise ConfigError(
            field, f"{artifact.uri} or what it imports was changed while the run began; run again"
        )
