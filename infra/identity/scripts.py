"""A user's Python file as an input of a stage, with the modules beside it that it imports.

Promises: an edit of the file or of a module that it reaches is another digest; what runs is a copy
whose digest is that of the plan, whatever happens to the user's files meanwhile.
Does not promise: data files that the code opens by itself; their paths belong into its arguments.
"""

import shutil
from pathlib import Path

from infra.errors import ConfigError
from infra.identity.fingerprint import script_files
from infra.store.artifacts import FileEntry, Manifest, build_manifest
from infra.store.canonical import sha256_file
from infra.store.stage_spec import Artifact

SCRIPT_KIND = "script"


def script_artifact(script: Path, field: str) -> Artifact:
    """A handle to a Python file that lies outside the store.

    Args:
        script: the file.
        field: the configuration field that named it, for the error.

    Returns:
        An artifact of kind `script` whose uri is the absolute path of the file.

    Raises:
        ConfigError: it does not exist, or something that it reaches is not Python.
    """
    script = script.expanduser().absolute()
    if not script.is_file():
        raise ConfigError(field, f"{script} does not exist (cwd is {Path.cwd()})")
    files = {
        name: FileEntry(size_bytes=path.stat().st_size, sha256=sha256_file(path))
        for name, path in script_files(script).items()
    }
    manifest = Manifest(kind=SCRIPT_KIND, files=files)
    return Artifact(kind=SCRIPT_KIND, uri=str(script), digest=manifest.digest)


def copy_script(artifact: Artifact, target: Path, field: str) -> None:
    """Copy a script's files, and see that they still are what was planned.

    Args:
        artifact: of `script_artifact`.
        target: replaced if it exists; the script lies in it under its own name.
        field: the configuration field that named it, for the error.

    Raises:
        ConfigError: a file was changed since.
    """
    shutil.rmtree(target, ignore_errors=True)
    for name, path in script_files(Path(artifact.uri)).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
    if build_manifest(target, SCRIPT_KIND).digest != artifact.digest:
        raise ConfigError(
            field, f"{artifact.uri} or what it imports was changed while the run began; run again"
        )
