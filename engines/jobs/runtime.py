"""The frame of every job: specification in, published and committed artifact out.

    python -m engines.jobs.<stage> STORE FINGERPRINT ATTEMPT

Promises: the job itself publishes its files and commits the fingerprint, so a job whose flow
died still finishes its stage; if another attempt took over, this one ends fenced and commits
nothing; a job that fails, or whose phase made no progress within its deadline, leaves its error
in the stage's channel, and its exit code: 2 with one line for a `ConfigError`, 143 after
SIGTERM, 1 for anything else.
Does not import torch: two of the six stages never need it.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
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
from infra.store.heartbeat import Heartbeat, Stall
from infra.store.stage_log import Attempt, generation
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import Storage, open_storage
from infra.store.work_channel import JobProblem, WorkChannel
from infra.tracking.journal import Journal, read_journal
from infra.waiting import when_there_is_room

EXIT_FAILURE = 1
LOAD_DEADLINE_S = 3600.0
PUBLISH_DEADLINE_S = 7200.0
"""Without progress for so long, loading or publishing hangs."""

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
        journal: metrics and progress; knows what earlier attempts recorded.
        heartbeat: tells step and phase to whoever watches.
        clock: wall seconds by phase, for the commit record.
        attempt_dir: this attempt's own local directory, for logs and files on the way.
        steps_dir: step checkpoints, shared by the attempts of one generation.
    """

    spec: StageSpec
    config: Config
    runtime: Runtime
    storage: Storage
    journal: Journal
    heartbeat: Heartbeat
    clock: PhaseClock
    attempt_dir: Path
    steps_dir: Path

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
        return self.storage.local_copy(artifact)

    def optional_input(self, name: str) -> Path | None:
        """As `input`, or None if the stage was given no such input."""
        return self.input(name) if name in self.spec.inputs else None

    @property
    def output_dir(self) -> Path:
        """An empty directory at the start of the body; its files are published at the end."""
        return self.attempt_dir / "output"


@dataclass(frozen=True)
class JobOutput:
    """What a body reports.

    Attributes:
        kind: kind of the artifact in `output_dir`.
        metrics: headline metrics of the stage.
        digests: sha256 by name of those files in it that were hashed already.
    """

    kind: str
    metrics: dict[str, float]
    digests: Mapping[str, str] = field(default_factory=dict)


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
    report: Callable[[JobProblem], None] | None = None
    try:
        storage, fingerprint, attempt = _read_arguments(sys.argv)
        channel = storage.channel(fingerprint)
        spec = channel.read_specification(attempt)
        report = partial(channel.write_error, attempt)
        _run(storage, channel, spec, config_type, body)
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
    if problem is not None and report is not None:
        report(_described(problem, code))
    end_output()
    raise SystemExit(code)


def _run(
    storage: Storage,
    channel: WorkChannel,
    spec: StageSpec,
    config_type: type[Config],
    body: Body[Config],
) -> None:
    """The life of a job between reading its specification and committing its output."""
    config = _validate(config_type, spec.config, "config")
    config.check()
    runtime = _validate(Runtime, spec.runtime, "runtime")
    refuse_changed_code(spec.sources, spec.libraries)
    for broken in import_external_modules():
        logger.warning("%s", broken)
    attempt = Attempt(spec.fingerprint, spec.attempt, spec.holder)
    storage.attempts.check(attempt)
    clock = PhaseClock()
    clock.add("load", _process_age_s())
    with ExitStack() as stack:
        context = _open_context(stack, storage, channel, spec, config, runtime, clock)
        output = body(context)
        context.heartbeat.enter("publish", PUBLISH_DEADLINE_S)
        with clock("save"):
            artifact = when_there_is_room(
                lambda: storage.publish(context.output_dir, output.kind, output.digests),
                storage.uri,
            )
        record = CommitRecord(
            fingerprint=spec.fingerprint,
            stage=spec.stage,
            artifact=artifact,
            attempt=spec.attempt,
            metrics=output.metrics,
            seconds={**clock.seconds, "total": _process_age_s()},
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        when_there_is_room(lambda: storage.commit(attempt, record), storage.uri)
    logger.info("stage %s committed %s", spec.stage, artifact.digest)


def _open_context(
    stack: ExitStack,
    storage: Storage,
    channel: WorkChannel,
    spec: StageSpec,
    config: Config,
    runtime: Runtime,
    clock: PhaseClock,
) -> JobContext[Config]:
    """The attempt's directory, heartbeat and journal; closed with the stack."""
    directory = channel.local_dir(spec.attempt)
    stacks = stack.enter_context((directory / "stacks.txt").open("w", encoding="utf-8"))
    heartbeat = Heartbeat(
        directory / "heartbeat",
        runtime.heartbeat_s,
        partial(_end_stalled, channel, spec.attempt),
        stacks,
        deadlines_s=runtime.progress_deadlines_s,
    )
    stack.enter_context(heartbeat).enter("load", LOAD_DEADLINE_S)
    entries = storage.attempts.entries(spec.fingerprint)
    earlier, _ = read_journal(storage, spec.fingerprint)
    journal = Journal(directory / "journal.jsonl", earlier)
    stack.callback(journal.close)
    steps_dir = channel.steps_dir(generation(entries)[0].number)
    context = JobContext(
        spec, config, runtime, storage, journal, heartbeat, clock, directory, steps_dir
    )
    shutil.rmtree(context.output_dir, ignore_errors=True)
    context.output_dir.mkdir()
    return context


def _end_stalled(channel: WorkChannel, attempt: int, stall: Stall) -> None:
    """End a job that hangs; the thread that hangs could not do it."""
    at = f" after step {stall.step}" if stall.step is not None else ""
    problem = JobProblem(
        type="NoProgressError",
        message=f"no progress in phase {stall.phase}{at} for {stall.deadline_s:g} s; the stacks "
        f"of all threads are in {channel.local_dir(attempt) / 'stacks.txt'}",
        exit_code=EXIT_FAILURE,
    )
    channel.write_error(attempt, problem)
    sys.stderr.write(f"{problem.message}\n")
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(EXIT_FAILURE)


def _read_arguments(argv: list[str]) -> tuple[Storage, str, int]:
    if len(argv) != 4 or not argv[3].isdigit():
        raise ConfigError("argv", f"got {argv[1:]}; need STORE FINGERPRINT ATTEMPT")
    return open_storage(argv[1]), argv[2], int(argv[3])


Model = TypeVar("Model", bound=StrictModel)


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


def _described(problem: BaseException, code: int) -> JobProblem:
    return JobProblem(type=type(problem).__name__, message=redact(str(problem)), exit_code=code)


def _process_age_s() -> float:
    """Seconds since this process started, imports included."""
    return max(0.0, datetime.now(UTC).timestamp() - psutil.Process().create_time())


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
