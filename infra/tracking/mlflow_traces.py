"""Samples of a stage's steps as MLflow traces of its run.

Promises: one trace per sample, with an id derived from run, step and sample, so that sending it
again replaces it. It has the data of the page that `rlhf show` writes: prompt, completion, score,
advantage, and the logprob difference of trainer and sampler per token.
Does not promise: durations; a trace begins and ends when its step was recorded.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infra.store.canonical import sha256_json
from infra.tracking.samples import KeptSample

if TYPE_CHECKING:
    from mlflow.entities import Run, Span, TraceInfo

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
