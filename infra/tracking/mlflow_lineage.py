"""Artifacts and samples in MLflow: logged models, datasets, registered versions, and traces.

A policy or model is one logged model of an experiment, identified by its digest and linked to every
run that made or read it. Any other artifact is one dataset per digest: an input of the runs that
read it and, with the context `output`, of the run that made it. A registered model has one version
per digest, to which the alias points; its files lie with the run in MLflow's model layout. Each
kept sample is a trace of its stage's run, with an id derived from run, step and sample: prompt,
completion, score, advantage, and the logprob difference of trainer and sampler per token.

Promises: every call can be repeated. The manifest is logged with the run and the logged model.
`mlflow.transformers.load_model("models:/NAME@champion")` loads a version, and `mlflow.pyfunc` one
without images, with a server also on other machines; an embedded tracker hard-links where possible.
Does not promise: to upload datasets, or weights above `MAX_UPLOAD_BYTES`; the tag `rlhf.uri` gives
their location. Two machines that log one digest at the same moment may create two logged models.
A trace has no durations: it begins and ends when its step was recorded.
"""

import base64
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infra.store.artifacts import EXTERNAL_KIND, MANIFEST_NAME, Manifest
from infra.store.canonical import sha256_json
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import Incumbent, ModelCandidate, TrackedOutput

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Run, Span, TraceInfo
    from mlflow.tracking import MlflowClient

MAX_KEY_CHARS = 250
MAX_UPLOAD_BYTES = 2 * 1024**3
ARTIFACT_PATH = "model"
METRIC_TAG = "rlhf.metric."
DIGEST_TAG = "rlhf.digest"
URI_TAG = "rlhf.uri"
FINGERPRINT_TAG = "rlhf.fingerprint"
MODEL_TAG = "rlhf.logged_model"
"""Id of the version's logged model. MLflow's own field cannot be used: a server refuses a version
whose files are not the logged model's, and these files belong to the run."""
BEAT_TAG = "rlhf.beat"
"""The model that had the alias before and lost the comparison, as JSON; empty if none."""
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def register_version(client: "MlflowClient", candidate: ModelCandidate, model_id: str) -> str:
    """Register a model with the id of its logged model, set the alias, and return the version."""
    version = _version_with(client, candidate.name, candidate.artifact.digest)
    if version is None:
        source = _log_model(client, candidate)
        tags = {
            **_tags(candidate.artifact),
            MODEL_TAG: model_id,
            **{METRIC_TAG + key: repr(float(value)) for key, value in candidate.metrics.items()},
        }
        created = client.create_model_version(candidate.name, source, candidate.run_id, tags=tags)
        version = str(created.version)
    beat = candidate.beat.model_dump_json() if candidate.beat else ""
    client.set_model_version_tag(candidate.name, version, BEAT_TAG, beat)
    client.set_registered_model_alias(candidate.name, candidate.alias, version)
    return version


def _tags(artifact: Artifact) -> dict[str, str]:
    fingerprint = artifact.fingerprint or ""
    return {DIGEST_TAG: artifact.digest, URI_TAG: artifact.uri, FINGERPRINT_TAG: fingerprint}


def incumbent_of(client: "MlflowClient", name: str, alias: str) -> Incumbent | None:
    """Return the version that an alias points to, read from its tags; None without a version."""
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
    """Return one `name@alias` for each digest of a version that an alias points to."""
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
    """Return the version with this digest; creates the registered model if it is absent."""
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
    from mlflow.models import Model

    source = candidate.directory
    files = [path for path in source.rglob("*") if path.is_file()]
    too_large = sum(path.stat().st_size for path in files) > MAX_UPLOAD_BYTES
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
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


def _place(source: Path, target: Path, *, links: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        # Also for an upload: scratch directory and store may share a disk.
        os.link(source, target)
    except OSError:
        if links:
            shutil.copyfile(source, target)
        else:
            target.symlink_to(source)


MODEL_KINDS = frozenset({"policy", "model"})
OUTPUT = "output"
MAX_DIGEST_CHARS = 36
"""MLflow's limit for a dataset; a tag of the input holds the whole digest."""


def log_inputs(client: "MlflowClient", run: "Run", inputs: Mapping[str, Artifact]) -> None:
    """Link a run to the artifacts that it reads."""
    from mlflow.entities import LoggedModelInput

    models = {
        each.digest: each
        for name, each in inputs.items()
        # A user's directory counts as a model if it is the input `model`.
        if each.kind in MODEL_KINDS or (each.kind == EXTERNAL_KIND and name == "model")
    }
    data = {name: each for name, each in inputs.items() if each.digest not in models}
    client.log_inputs(
        run.info.run_id,
        datasets=[_dataset(name, each, name) for name, each in data.items()],
        models=[LoggedModelInput(model_of(client, run, each)) for each in models.values()],
    )


def log_output(client: "MlflowClient", run: "Run", output: TrackedOutput) -> None:
    """Link a run to its output, and its headline metrics to the model that they describe.

    That is the model that the run made, else the only model that it read, else none.
    """
    from mlflow.entities import LoggedModelOutput

    run_id, artifact = run.info.run_id, output.artifact
    read = run.inputs.model_inputs if run.inputs else ()
    about = read[0].model_id if len(read) == 1 else None
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


def headline_rows(
    run: "Run", metrics: Mapping[str, float], model_id: str | None = None
) -> list["Metric"]:
    """Return the headline metrics that a run lacks, as rows at step 0 with the run's start as time.

    With that time, sending them again has no effect. `model_id` is the model that they describe.
    """
    from mlflow.entities import Metric

    return [
        Metric(metric_key(name), float(value), run.info.start_time, 0, model_id=model_id)
        for name, value in metrics.items()
        if metric_key(name) not in run.data.metrics
    ]


def metric_key(name: str) -> str:
    """Replace the characters that MLflow does not allow: `pass@4` becomes `pass_at_4`.

    MLflow also requires a valid path, so empty and dot parts (`a//b`, `../b`) become `_`.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_")).split("/")
    path = "/".join("_" if part in {"", ".", ".."} else part for part in parts)
    return path[:MAX_KEY_CHARS].rstrip("/")


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
        model = client.create_logged_model(
            run.info.experiment_id,
            name=made_as or artifact.kind,
            source_run_id=run.info.run_id if made_as else None,
            tags=_tags(artifact),
            model_type=artifact.kind,
        )
    if model.status != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


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


MAX_PREVIEW_CHARS = 1000
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16


def log_traces(
    uri: str,
    run: "Run",
    steps: Mapping[int, Sequence[KeptSample]],
    times_ms: Mapping[int, int],
) -> None:
    """Send samples, by step, as traces of a run; `times_ms` of the steps are since the epoch."""
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    for step, samples in steps.items():
        at_ms = times_ms.get(step, run.info.start_time)
        spans = []
        for sample in samples:
            key = sha256_json([run.info.run_id, step, sample.name])
            info = _trace(run, step, sample, at_ms, key)
            client.start_trace(info)
            spans.append(_span(sample, info, key))
        client.log_spans(run.info.experiment_id, spans)


def _trace(run: "Run", step: int, sample: KeptSample, at_ms: int, key: str) -> "TraceInfo":
    from mlflow.entities import (
        AssessmentSource,
        Feedback,
        TraceInfo,
        TraceLocation,
        TraceState,
    )

    told = {"score": sample.score, "advantage": sample.advantage}
    assessments = []
    for name, value in told.items():
        if value is not None:
            by = AssessmentSource("CODE", "reward" if name == "score" else "trainer")
            feedback = Feedback(name=name, value=value, source=by)
            # A generated id would duplicate the assessment when the trace is sent again.
            feedback.assessment_id = f"a-{sha256_json([key, name])[:_TRACE_DIGITS]}"
            assessments.append(feedback)
    return TraceInfo(
        trace_id=f"tr-{key[:_TRACE_DIGITS]}",
        trace_location=TraceLocation.from_experiment_id(run.info.experiment_id),
        request_time=at_ms,
        state=TraceState.OK,
        request_preview=sample.prompt[:MAX_PREVIEW_CHARS],
        response_preview="".join(sample.tokens)[:MAX_PREVIEW_CHARS],
        execution_duration=0,
        trace_metadata={"mlflow.sourceRun": run.info.run_id},
        tags={"mlflow.traceName": f"step {step}", "rlhf.step": str(step)},
        assessments=assessments,
    )


def _span(sample: KeptSample, info: "TraceInfo", key: str) -> "Span":
    from mlflow.entities import Span

    attributes: dict[str, Any] = {
        "mlflow.traceRequestId": info.trace_id,
        "mlflow.spanType": "LLM",
        "mlflow.spanInputs": {"prompt": sample.prompt},
        "mlflow.spanOutputs": {"answer": "".join(sample.tokens)},
        **sample.model_dump(exclude={"prompt"}),
    }
    at_ns = info.request_time * 10**6
    return Span.from_dict(
        {
            "trace_id": _bytes_of(key[:_TRACE_DIGITS]),
            "span_id": _bytes_of(key[-_SPAN_DIGITS:]),
            "parent_span_id": "",
            "name": info.tags["mlflow.traceName"],
            "start_time_unix_nano": at_ns,
            "end_time_unix_nano": at_ns,
            "status": {"code": "STATUS_CODE_OK"},
            "attributes": {name: json.dumps(value) for name, value in attributes.items()},
        }
    )


def _bytes_of(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode("ascii")
