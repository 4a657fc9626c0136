"""Answers of a stage: sampled once and stored for other stages that score them differently.

Each call's answers are an artifact of kind `answers` with its own fingerprint: of the model, the
requests, sampling and serving settings, and their code. Rewards, judges, k and the confidence are
not part of it, except for distributions that a reward's file imports.
Promises: equal requests to an equal model are answered from the store (exceptions: `KeptAnswers`);
missing or damaged answers are sampled; a failure to store answers does not fail the stage.
Does not promise to keep them: `rlhf gc` removes them by age.
"""

import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engines.config.plugins import named_rows, plugin_modules
from engines.config.stages.serving import ServingStageConfig
from engines.jobs.process.runtime import JobContext
from engines.types import Completion, Generate, RolloutRequest
from infra import env
from infra.errors import PipelineError
from infra.identity.fingerprint import outside_code, source_closure
from infra.store.canonical import sha256_json
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Holder, latest_commit
from infra.store.stage_spec import CommitRecord
from infra.store.storage import Storage

ANSWERS = "answers"
_FILE = "answers.parquet"
_SCHEMA_VERSION = 1
_MODELS = ("policy", "model")
"""Input names of the evaluated model."""
SAMPLING_CODE = ("engines.jobs.serving.model", "engines.jobs.process.torch_setup")
"""Modules from which all sampling code is reached, except plugins."""
_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("sample_index", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("policy_versions", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
    ]
)

_log = logging.getLogger(__name__)


class KeptAnswers:
    """Answers the requests of a call from the store, or samples all if an answer is absent.

    A stage that is deliberately run again samples anew. With `rollout.openai_endpoint` nothing is
    found or stored, because other clients may join the engine's batches.
    """

    def __init__(self, context: JobContext[ServingStageConfig], generate: Generate) -> None:
        self._context, self._generate = context, generate
        self._repeats = not context.config.rollout.openai_endpoint
        spec, config = context.spec, context.config
        parts = [part for part in config.plugins() if part[0] != "reward"]
        judging = plugin_modules([part for part in config.plugins() if part[0] == "reward"])
        roots = [*SAMPLING_CODE, *(m for m in config.plugin_modules() if m not in judging)]
        # What the answers of a stage depend on, besides the requests.
        self._identity = {
            "part": ANSWERS,
            "schema": _SCHEMA_VERSION,
            "config": config.serving_values(),
            "model": {name: spec.inputs[name].digest for name in _MODELS if name in spec.inputs},
            "sources": source_closure(roots, counts=spec.sources.__contains__),
            "parts": [row.counted for row in named_rows(parts)],
            "outside": outside_code(named_rows(parts)),
            "libraries": {**spec.libraries},
            "rollout_libraries": {**spec.rollout_libraries},
            "device": [env.RLHF_ENGINE_DEVICE.get(), env.RLHF_ENGINE_VENDOR.get()],
        }
        members = context.storage.attempts.generation(
            context.spec.fingerprint, context.spec.attempt
        )
        self._finds = self._repeats and bool(members) and members[0].number == 0
        self.num_found = self.num_sampled = 0

    def __call__(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Return the completions by request and seed."""
        asked = [identity_values(request) for request in requests]
        fingerprint = sha256_json({**self._identity, "requests": sha256_json(asked)})
        storage = self._context.storage
        found = find_answers(storage, fingerprint, requests) if self._finds else None
        if found is not None:
            self.num_found += sum(map(len, found))
            return found
        answers = self._generate(requests)
        self.num_sampled += sum(map(len, answers))
        try:
            if self._repeats:
                self._keep(fingerprint, answers)
        except (PipelineError, OSError) as error:
            _log.warning("answers are not kept for another evaluation: %s", error)
        return answers

    def _keep(self, fingerprint: str, answers: Sequence[Sequence[Completion]]) -> None:
        storage, spec = self._context.storage, self._context.spec
        directory = self._context.attempt_dir / ANSWERS
        directory.mkdir()
        try:
            write_answers(answers, directory / _FILE)
            artifact = storage.publish(directory, ANSWERS)
        finally:  # frees the disk for the stage's own files
            shutil.rmtree(directory, ignore_errors=True)
        log = storage.attempts.entries(fingerprint)
        kept = latest_commit(log)
        if kept is not None and kept.artifact.digest == artifact.digest:
            return  # already stored by another attempt
        # An earlier holder died between two calls, or is about to commit the same answers.
        attempt = storage.attempts.hold(
            fingerprint, Holder(id=spec.holder, process=own_stamp()), len(log)
        )
        storage.commit(
            attempt,
            CommitRecord(
                fingerprint=fingerprint,
                stage=ANSWERS,
                artifact=artifact,
                attempt=attempt.number,
                committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )


def identity_values(request: RolloutRequest) -> dict[str, Any]:
    """Return what the answers to a request depend on as JSON values; images as SHA-256."""
    values = dataclasses.asdict(request)
    if not values.pop("images"):
        return values
    return values | {"images": [hashlib.sha256(data).hexdigest() for data in request.images]}


def find_answers(
    storage: Storage, fingerprint: str, requests: Sequence[RolloutRequest]
) -> list[list[Completion]] | None:
    """Return stored answers by request and seed; None if any is missing or unreadable."""
    try:
        record = storage.lookup(fingerprint)
        if record is None:
            return None
        answers = read_answers(storage.local_copy(record.artifact) / _FILE)
    except (PipelineError, OSError, pa.ArrowException) as error:
        _log.warning("answers that were kept cannot be used: %s", error)
        return None
    by_sample = {(each.request_id, each.sample_index): each for each in answers}
    if any(key not in by_sample for request in requests for key in request.sample_keys):
        return None
    return [[by_sample[key] for key in request.sample_keys] for request in requests]


def write_answers(answers: Sequence[Sequence[Completion]], path: Path) -> None:
    """Write completions as parquet; equal completions give equal bytes per pyarrow version."""
    samples = [each for of_request in answers for each in of_request]
    columns = {name: [getattr(each, name) for each in samples] for name in _SCHEMA.names}
    pq.write_table(pa.table(columns, schema=_SCHEMA), path, compression="zstd", store_schema=False)


def read_answers(path: Path) -> list[Completion]:
    """Return the completions of a file of `write_answers`, in order."""
    return [Completion(**row) for row in pq.read_table(path, schema=_SCHEMA).to_pylist()]
