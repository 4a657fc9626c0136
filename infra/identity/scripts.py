"""A user's Python file and the modules beside it that it imports, as an input of a stage.

Promises: an edit of any of these files changes the digest; a job runs a copy with the planned
digest.
Does not promise: to track data files that the code opens; pass their paths as its arguments.
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
    """Return an artifact of kind `script` whose uri is the absolute path of the file.

    Raises:
        ConfigError: the file does not exist, or a file that it reaches is not Python.
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
