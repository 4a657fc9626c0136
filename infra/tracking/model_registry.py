"""Models that passed the gate, as versions in MLflow's registry.

Promises: one version per digest, however often the same model is registered; the alias points to
it afterwards. Embedded, a version points at the artifact's directory. Through a server, which
takes no path of another machine, the files are uploaded with the run; of a model too large for
that, only the manifest is, and the tag `rlhf.uri` says where the weights are.
Does not promise: that MLflow itself can load the model; its files are a Hugging Face directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import ServiceError
from infra.store.stage_spec import Artifact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MAX_UPLOAD_BYTES = 2 * 1024**3
ARTIFACT_PATH = "model"
METRIC_TAG = "rlhf.metric."
DIGEST_TAG = "rlhf.digest"


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model.

    Attributes:
        version: its number, as MLflow writes it.
        digest: of the artifact.
        uri: where the artifact is.
        metrics: headline numbers at its registration.
    """

    version: str
    digest: str
    uri: str
    metrics: Mapping[str, float]


def register_version(
    client: "MlflowClient",
    name: str,
    alias: str,
    artifact: Artifact,
    run_id: str | None,
    metrics: Mapping[str, float],
    *,
    upload: bool,
) -> str:
    """Register a model and give it the alias.

    Args:
        client: of the registry.
        name: of the registered model; created if absent.
        alias: moves to this version.
        artifact: the model.
        run_id: the run that made it.
        metrics: kept as tags.
        upload: the registry is a server: it gets the files.

    Returns:
        The version.

    Raises:
        ServiceError: a server needs the run to put the files in, and there is none.
    """
    version = _version_with(client, name, artifact.digest)
    if version is None:
        source = _upload(client, artifact, run_id) if upload else artifact.uri
        tags = {DIGEST_TAG: artifact.digest, "rlhf.uri": artifact.uri}
        tags |= {"rlhf.fingerprint": artifact.fingerprint or ""}
        tags |= {METRIC_TAG + key: repr(float(value)) for key, value in metrics.items()}
        version = str(client.create_model_version(name, source, run_id, tags=tags).version)
    client.set_registered_model_alias(name, alias, version)
    return version


def aliased_version(client: "MlflowClient", name: str, alias: str) -> RegisteredVersion | None:
    """The version that bears an alias, or None."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise
    metrics = {
        key.removeprefix(METRIC_TAG): float(value)
        for key, value in found.tags.items()
        if key.startswith(METRIC_TAG)
    }
    return RegisteredVersion(
        version=str(found.version),
        digest=found.tags.get(DIGEST_TAG, ""),
        uri=found.tags.get("rlhf.uri", ""),
        metrics=metrics,
    )


def _version_with(client: "MlflowClient", name: str, digest: str) -> str | None:
    """The version that holds this digest; creates the registered model if it is absent."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for found in client.search_model_versions(f"name = '{name}'"):
        if found.tags.get(DIGEST_TAG) == digest:
            return str(found.version)
    return None


def _upload(client: "MlflowClient", artifact: Artifact, run_id: str | None) -> str:
    """Put the model's files, or its manifest alone, with the run; where they are then."""
    if "://" in artifact.uri:
        return artifact.uri
    if run_id is None:
        raise ServiceError("a model is registered through a server with the run that made it")
    directory = Path(artifact.uri)
    size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if size_bytes <= MAX_UPLOAD_BYTES:
        client.log_artifacts(run_id, str(directory), ARTIFACT_PATH)
    else:
        client.log_artifact(run_id, str(directory / "manifest.json"), ARTIFACT_PATH)
    return f"{client.get_run(run_id).info.artifact_uri}/{ARTIFACT_PATH}"
