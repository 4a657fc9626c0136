"""Inputs and outputs of stages as MLflow's logged models and datasets.

Promises: a policy or model is one logged model of an experiment, identified by its digest and
linked to every run that made or read it. Any other artifact is one dataset per digest: an input of
the runs that read it and, with the context `output`, of the run that made it. The manifest is
logged with the run and the logged model. Every call can be repeated.
Does not promise: to upload the files; the dataset's source and the tag `rlhf.uri` give their
location. Two machines that log one digest at the same moment may create two logged models.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infra.store.artifacts import EXTERNAL_KIND, MANIFEST_NAME, Manifest
from infra.store.stage_spec import Artifact
from infra.tracking.mlflow_models import DIGEST_TAG, FINGERPRINT_TAG, URI_TAG
from infra.tracking.mlflow_tracker import headline_rows
from infra.tracking.tracker import TrackedOutput

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

MODEL_KINDS = frozenset({"policy", "model"})
OUTPUT = "output"
MAX_DIGEST_CHARS = 36
"""MLflow's limit for a dataset; a tag of the input holds the whole digest."""


def log_inputs(client: "MlflowClient", run: "Run", inputs: Mapping[str, Artifact]) -> None:
    """Link a run to the artifacts that it reads."""
    from mlflow.entities import LoggedModelInput

    models = {each.digest: each for name, each in inputs.items() if _is_model(name, each)}
    data = {name: each for name, each in inputs.items() if each.digest not in models}
    found = [model_of(client, run, each) for each in models.values()]
    client.log_inputs(
        run.info.run_id,
        datasets=[_dataset(name, each, name) for name, each in data.items()],
        models=[LoggedModelInput(model_id) for model_id in found],
    )


def log_output(client: "MlflowClient", run: "Run", output: TrackedOutput) -> None:
    """Link a run to its output, and its headline metrics to the model that they describe.

    That is the model that the run made, else the only model that it read, else none.
    """
    from mlflow.entities import LoggedModelOutput

    run_id, artifact = run.info.run_id, output.artifact
    read = _models_read(run)
    about = read[0] if len(read) == 1 else None
    made = None
    if artifact.kind in MODEL_KINDS:
        made = about = model_of(client, run, artifact, output.name)
        known = run.outputs.model_outputs if run.outputs else ()
        if made not in {model.model_id for model in known}:
            client.log_outputs(run_id, [LoggedModelOutput(made, 0)])
    else:
        dataset = _dataset(artifact.kind, artifact, OUTPUT, output.manifest, output.metrics)
        client.log_inputs(run_id, datasets=[dataset])
    client.log_batch(run_id, metrics=headline_rows(run, output.metrics, about))
    if output.manifest is not None:
        with tempfile.TemporaryDirectory(prefix="rlhf-manifest-") as scratch:
            path = Path(scratch, MANIFEST_NAME)
            path.write_bytes(output.manifest.to_bytes())
            client.log_artifact(run_id, str(path), OUTPUT)
            if made is not None:
                client.log_model_artifact(made, str(path))


def model_of(
    client: "MlflowClient", run: "Run", artifact: Artifact, made_as: str | None = None
) -> str:
    """Return the id of an artifact's logged model; creates it if necessary.

    `made_as` is the name of the stage if `run` produced the artifact; None if it reads it.
    """
    found = client.search_logged_models(
        [run.info.experiment_id],
        f"tags.`{DIGEST_TAG}` = '{artifact.digest}'",
        max_results=1,
        order_by=[{"field_name": "creation_timestamp", "ascending": True}],
    )
    model = found[0] if found else None
    if model is None:
        tags = {
            DIGEST_TAG: artifact.digest,
            URI_TAG: artifact.uri,
            FINGERPRINT_TAG: artifact.fingerprint or "",
        }
        model = client.create_logged_model(
            run.info.experiment_id,
            name=made_as or artifact.kind,
            source_run_id=run.info.run_id if made_as else None,
            tags=tags,
            model_type=artifact.kind,
        )
    if model.status != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


def _models_read(run: "Run") -> list[str]:
    return [model.model_id for model in run.inputs.model_inputs] if run.inputs else []


def _is_model(name: str, artifact: Artifact) -> bool:
    """True for a model; a user's directory counts as one if it is the input `model`."""
    return artifact.kind in MODEL_KINDS or (artifact.kind == EXTERNAL_KIND and name == "model")


def _dataset(
    name: str,
    artifact: Artifact,
    context: str,
    manifest: Manifest | None = None,
    metrics: Mapping[str, float] | None = None,
) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    schema, rows = _tables(artifact, manifest) if manifest else ([], {})
    profile: dict[str, Any] = {**(metrics or {}), **rows}
    if manifest:
        sizes = [entry.size_bytes for entry in manifest.files.values()]
        profile |= {"num_files": len(sizes), "size_bytes": sum(sizes)}
    dataset = Dataset(
        # A digest needs the same name in all stages, whose input names differ.
        name if artifact.kind == EXTERNAL_KIND else artifact.kind,
        artifact.digest[:MAX_DIGEST_CHARS],
        source_type=urlsplit(artifact.uri).scheme or "local",
        source=json.dumps({"uri": artifact.uri}),
        schema=json.dumps({"mlflow_colspec": schema}) if schema else None,
        profile=json.dumps(profile) if profile else None,
    )
    tags = {"mlflow.data.context": context, "digest": artifact.digest}
    return DatasetInput(dataset, [InputTag(*tag) for tag in tags.items()])


def _tables(artifact: Artifact, manifest: Manifest) -> tuple[list[dict[str, Any]], dict[str, int]]:
    import pyarrow.parquet as pq
    from mlflow.types.schema import ColSpec

    columns: list[dict[str, Any]] = []
    rows: dict[str, int] = {}
    for name in sorted(manifest.files):
        path = Path(artifact.uri, name)
        if path.suffix == ".parquet" and path.is_file():
            metadata = pq.read_metadata(path)
            rows[f"num_rows/{path.stem}"] = metadata.num_rows
            columns += [
                ColSpec(_type(field.type), f"{path.stem}.{field.name}", required=False).to_dict()
                for field in metadata.schema.to_arrow_schema()
            ]
    return columns, rows


def _type(arrow: Any) -> Any:
    """Convert an Arrow type to an MLflow type; string if there is no equivalent."""
    import pyarrow.types as of
    from mlflow.types.schema import Array, DataType, Object, Property

    if of.is_list(arrow):
        return Array(_type(arrow.value_type))
    if of.is_struct(arrow) and arrow.num_fields:
        return Object([Property(field.name, _type(field.type), required=False) for field in arrow])
    if of.is_boolean(arrow):
        return DataType.boolean
    if of.is_integer(arrow):
        return DataType.long
    return DataType.double if of.is_floating(arrow) else DataType.string
