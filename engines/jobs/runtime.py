"""The frame of every job: specification in, published and committed artifact out.

    python -m engines.jobs.<stage> SPEC

Promises: the job itself publishes its files and commits the fingerprint, so a job whose flow
died still finishes its stage; if another attempt committed first, that commit stands; a job
that fails leaves `attempt-<n>/error.json` and its exit code: 2 with one line for a
`ConfigError`, 143 after SIGTERM, 1 for anything else.
Does not import torch: two of the six stages never need it.
"""

import json
import logging
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import psutil
from pydantic import ValidationError

from engines.config.base import StrictModel
from engines.config.stages import Runtime, StageConfig
from engines.trainers.phases import PhaseClock
from infra import env
from infra.errors import EXIT_TERMINATED, EXIT_USER_ERROR, ConfigError
from infra.field_errors import to_config_error
from infra.identity.fingerprint import refuse_changed_code
from infra.plugins import import_external_modules
from infra.redact import RedactingFilter, redact
from infra.redacted_output import redact_output
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import canonical_json
from infra.store.heartbeat import Heartbeat
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import Storage, open_storage
from infra.tracking.journal import Journal

EXIT_FAILURE = 1

Config = TypeVar("Config", bound=StageConfig)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobContext(Generic[Config]):
    """What a job's body works with.

    Attributes:
        spec: the stage as the task described it.
        config: its validated configuration.
        runtime: what cannot change the output.
        storage: the store of inputs and outputs.
        journal: metrics and progress, shared by all attempts of the stage.
        heartbeat: tells step and phase to whoever watches.
        clock: wall seconds by phase, for the commit record.
    """

    spec: StageSpec
    config: Config
    runtime: Runtime
    storage: Storage
    journal: Journal
    heartbeat: Heartbeat
    clock: PhaseClock

    def input(self, name: str) -> Path:
        """A verified local directory (or external file) of an input.

        Args:
            name: as the stage knows it (`dataset`, `policy`, ...).

        Returns:
            Where it is; the files belong to the store and are only read.

        Raises:
            ConfigError: the stage was given no input of that name.
            ArtifactError: it is gone or damaged.
        """
        artifact = self.spec.inputs.get(name)
        if artifact is None:
            given = ", ".join(sorted(self.spec.inputs)) or "none"
            raise ConfigError(f"inputs.{name}", f"missing; need an artifact; given: {given}")
        return self.storage.fetch(artifact)

    def optional_input(self, name: str) -> Path | None:
        """As `input`, or None if the stage was given no such input."""
        return self.input(name) if name in self.spec.inputs else None

    @property
    def output_dir(self) -> Path:
        """An empty directory at the start of the body; its files are published at the end."""
        return self.spec.output_dir


@dataclass(frozen=True)
class JobOutput:
    """What a body reports.

    Attributes:
        kind: kind of the artifact in `output_dir`.
        metrics: headline metrics of the stage.
    """

    kind: str
    metrics: dict[str, float]


Body = Callable[[JobContext[Config]], JobOutput]


def run_job(config_type: type[Config], body: Body[Config]) -> NoReturn:
    """Run one job and end the process with its exit code.

    Args:
        config_type: schema of `StageSpec.config`.
        body: computes the output.
    """
    signal.signal(signal.SIGTERM, _terminate)
    end_output = redact_output()
    _configure_logging()
    attempt_dir: Path | None = None
    try:
        spec = _read_spec(sys.argv)
        attempt_dir = spec.attempt_dir
        attempt_dir.mkdir(parents=True, exist_ok=True)
        _run(spec, config_type, body)
        code, problem = 0, None
    except ConfigError as error:
        code, problem = EXIT_USER_ERROR, error
        if env.RLHF_DEBUG.get_bool():
            sys.stderr.write(redact(traceback.format_exc()))
        sys.stderr.write(f"{redact(str(error))}\n")
    except SystemExit as error:
        code, problem = EXIT_TERMINATED, error
        sys.stderr.write("stopped by SIGTERM\n")
    except Exception as error:  # noqa: BLE001  the process boundary: recorded, then exit 1
        code, problem = EXIT_FAILURE, error
        sys.stderr.write(redact(traceback.format_exc()))
    if problem is not None and attempt_dir is not None:
        _write_error(attempt_dir / "error.json", problem, code)
    end_output()
    raise SystemExit(code)


def _run(spec: StageSpec, config_type: type[Config], body: Body[Config]) -> None:
    """The life of a job between reading its specification and committing its output."""
    config = _validate(config_type, spec.config, "config")
    config.check()
    runtime = _validate(Runtime, spec.runtime, "runtime")
    refuse_changed_code(spec.sources, spec.libraries)
    for broken in import_external_modules():
        logger.warning("%s", broken)
    storage = open_storage(spec.store_uri)
    if storage.committed(spec.fingerprint) is not None:
        logger.info("stage %s is already committed; nothing to do", spec.stage)
        return
    shutil.rmtree(spec.output_dir, ignore_errors=True)
    spec.output_dir.mkdir(parents=True)
    clock = PhaseClock()
    clock.add("load", _process_age_s())
    with ExitStack() as stack:
        heartbeat = stack.enter_context(
            Heartbeat(spec.attempt_dir / "heartbeat.json", runtime.heartbeat_s)
        )
        journal = Journal(spec.journal_path)
        stack.callback(journal.close)
        context = JobContext(spec, config, runtime, storage, journal, heartbeat, clock)
        output = body(context)
        heartbeat.phase = "publish"
        with clock("save"):
            artifact = storage.publish(spec.output_dir, output.kind, spec.fingerprint)
        record = CommitRecord(
            fingerprint=spec.fingerprint,
            stage=spec.stage,
            artifact=artifact,
            attempt=spec.attempt,
            metrics=output.metrics,
            seconds={**clock.seconds, "total": _process_age_s()},
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        standing = storage.commit(record)
    logger.info("stage %s committed %s", spec.stage, standing.artifact.digest)


def _read_spec(argv: list[str]) -> StageSpec:
    if len(argv) != 2:
        raise ConfigError("argv", f"got {len(argv) - 1} arguments; need the path of a spec.json")
    path = Path(argv[1])
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), "does not exist; need the spec.json of a stage") from None
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON ({error})") from None
    return _validate(StageSpec, content, "spec")


Model = TypeVar("Model", StageSpec, Runtime, StrictModel)


def _validate(schema: type[Model], values: object, path: str) -> Model:
    """The values as a model; the first violation becomes one line."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise to_config_error(error, schema, path) from None


def _terminate(signum: int, frame: object) -> NoReturn:
    """End through every `finally`, so that children and files are left in order."""
    # A second signal would interrupt that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(EXIT_TERMINATED)


def _write_error(path: Path, problem: BaseException, code: int) -> None:
    message = redact(str(problem))
    record = {"type": type(problem).__name__, "message": message, "exit_code": code}
    atomic_write_bytes(path, canonical_json(record))


def _process_age_s() -> float:
    """Seconds since this process started, imports included."""
    return max(0.0, datetime.now(UTC).timestamp() - psutil.Process().create_time())


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
