"""Models that a gate decided about, as versions in MLflow's registry.

Promises: one version per digest, however often the same model is registered; the alias points to
it afterwards; `mlflow.transformers.load_model("models:/NAME@champion")` and `mlflow.pyfunc` load
it, on another machine too if a server holds the files: they lie with the run as an MLflow model
does, weights beside an `MLmodel` file. Embedded they are links to the store's files where the
disk allows it, not copies.
Does not promise: the files of a model above `MAX_UPLOAD_BYTES` through a server. Of that only
`MLmodel` and the manifest are there, and the tag `rlhf.uri` says where the weights are.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.store.stage_spec import Artifact
from infra.tracking.tracker import Incumbent, ModelCandidate

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MAX_UPLOAD_BYTES = 2 * 1024**3
ARTIFACT_PATH = "model"
METRIC_TAG = "rlhf.metric."
DIGEST_TAG = "rlhf.digest"
URI_TAG = "rlhf.uri"
FINGERPRINT_TAG = "rlhf.fingerprint"
MODEL_TAG = "rlhf.logged_model"
"""Id of the logged model that a version is. MLflow's own field for it is none for files that lie
with a run: a server refuses a version whose files are not the logged model's own."""
BEAT_TAG = "rlhf.beat"
"""The model that had the alias before, as JSON; empty: none that it was compared with."""
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def register_version(client: "MlflowClient", candidate: ModelCandidate, model_id: str) -> str:
    """Register a model and give it the alias.

    Args:
        client: of the registry.
        candidate: the model.
        model_id: the logged model that it is.

    Returns:
        The version.
    """
    artifact = candidate.artifact
    version = _version_with(client, candidate.name, artifact.digest)
    if version is None:
        source = _log_model(client, candidate)
        tags = {
            DIGEST_TAG: artifact.digest,
            URI_TAG: artifact.uri,
            FINGERPRINT_TAG: artifact.fingerprint or "",
            MODEL_TAG: model_id,
            **{METRIC_TAG + key: repr(float(value)) for key, value in candidate.metrics.items()},
        }
        created = client.create_model_version(candidate.name, source, candidate.run_id, tags=tags)
        version = str(created.version)
    beat = candidate.beat.model_dump_json() if candidate.beat else ""
    client.set_model_version_tag(candidate.name, version, BEAT_TAG, beat)
    client.set_registered_model_alias(candidate.name, candidate.alias, version)
    return version


def bearer_of(client: "MlflowClient", name: str, alias: str) -> Incumbent | None:
    """The version that an alias points to, as its tags tell it.

    Args:
        client: of the registry.
        name: of the registered model.
        alias: of one of its versions.

    Returns:
        The version; None without one.
    """
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_registered_model(name).aliases.get(alias)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        version = None
    if version is None:
        return None
    found = client.get_model_version(name, version)
    tags, beat = found.tags, found.tags.get(BEAT_TAG)
    artifact = Artifact(
        kind="model",
        uri=tags.get(URI_TAG, found.source or ""),
        digest=tags.get(DIGEST_TAG, ""),
        fingerprint=tags.get(FINGERPRINT_TAG) or None,
    )
    return Incumbent(str(version), artifact, Artifact.model_validate_json(beat) if beat else None)


def aliased_digests(client: "MlflowClient") -> dict[str, str]:
    """The digests of the versions that aliases point to, each with one `name@alias`."""
    found: dict[str, str] = {}
    token: str | None = None
    while True:
        page = client.search_registered_models(page_token=token)
        for model in page:
            for alias, version in model.aliases.items():
                tags = client.get_model_version(model.name, version).tags
                if DIGEST_TAG in tags:
                    found[tags[DIGEST_TAG]] = f"{model.name}@{alias}"
        token = page.token
        if not token:
            return found


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


def _log_model(client: "MlflowClient", candidate: ModelCandidate) -> str:
    """Put the model with the run; where it is then."""
    run = client.get_run(candidate.run_id)
    place = f"{run.info.artifact_uri}/{ARTIFACT_PATH}"
    if place.startswith("file://"):
        _lay_out(candidate, Path(place.removeprefix("file://")), links=True)
        return place
    with tempfile.TemporaryDirectory(prefix="rlhf-model-") as scratch:
        directory = Path(scratch, ARTIFACT_PATH)
        _lay_out(candidate, directory, links=False)
        client.log_artifacts(candidate.run_id, str(directory), ARTIFACT_PATH)
    return place


def _lay_out(candidate: ModelCandidate, directory: Path, *, links: bool) -> None:
    """The model's files as MLflow's flavor `transformers` wants them."""
    from mlflow.models import Model

    source = candidate.directory
    files = [path for path in source.rglob("*") if path.is_file()]
    too_large = sum(path.stat().st_size for path in files) > MAX_UPLOAD_BYTES
    flavor = _flavor(json.loads((source / "config.json").read_text(encoding="utf-8")), source)
    for path in files:
        name = path.relative_to(source)
        if too_large and not links and path.name != "manifest.json":
            continue
        _place(path, directory / "model" / name, links=links)
        if not path.name.endswith(_WEIGHTS):
            for component in ("tokenizer", "processor"):
                if f"{component}_type" in flavor:
                    _place(path, directory / "components" / component / name, links=links)
    model = Model(artifact_path=ARTIFACT_PATH, run_id=candidate.run_id)
    model.add_flavor("transformers", **flavor)
    if "processor_type" not in flavor:
        python = ".".join(str(part) for part in sys.version_info[:3])
        model.add_flavor(
            "python_function", loader_module="mlflow.transformers", python_version=python
        )
    model.save(str(directory / "MLmodel"))


def _flavor(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """What `mlflow.transformers` reads before it loads a directory."""
    flavor: dict[str, Any] = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": config["architectures"][0],
        "model_binary": "model",
        "framework": "pt",
        "torch_dtype": f"torch.{config.get('dtype', 'float32')}",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }
    if (source / "preprocessor_config.json").exists():
        flavor |= {"task": "image-text-to-text", "instance_type": "ImageTextToTextPipeline"}
        flavor["processor_type"] = "AutoProcessor"
    return flavor


def _place(source: Path, target: Path, *, links: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        # A link of the weights for the upload too, where scratch and store share a disk.
        os.link(source, target)
    except OSError:
        if links:
            shutil.copyfile(source, target)
        else:
            target.symlink_to(source)
