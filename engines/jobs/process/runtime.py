"""Runs a job from its specification to the published and committed artifact.

    python -m engines.jobs.<stage> STORE FINGERPRINT ATTEMPT

Promises: the job itself publishes its files and commits the fingerprint, so it finishes even if its
flow died. If another attempt took over, this one is fenced at its next step checkpoint (later, if
the store does not answer) and never commits. A job that fails or stalls leaves its error in the
stage's channel, with its own text and its cause (memory, disk, a dead or hanging rank, NaN), and
exits with 2 for a `ConfigError`, 143 after SIGTERM, and 1 otherwise.
If a following stage waits only for this output, this process claims it before the commit and runs
it afterwards as a separate attempt; a stage that cannot be claimed is left to a job of its own.
After the commit the stage's step checkpoints and work files are removed; its logs stay.
Does not import torch, which some stages never need. Does not know the peak memory of ranks, only
that of this process and its children.
"""

import errno
import gc
import importlib
import logging
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import psutil

from engines.config.stages.base import Runtime, StageConfig
from engines.errors import NonFiniteError, WorkerError
from engines.trainers.step_timer import PHASE_NOTE, PhaseClock, note_phase
from infra import env
from infra.errors import (
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    ConfigError,
    DeadlineError,
    FencedError,
    PipelineError,
)
from infra.host.stacks import ask_for_stacks
from infra.identity.fingerprint import (
    next_fingerprint,
    refuse_changed_code,
    refuse_other_libraries,
)
from infra.plugins import import_external_modules
from infra.redact import RedactingFilter, redact, redact_output
from infra.store.heartbeat import Heartbeat, Stall
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Attempt
from infra.store.stage_spec import Artifact, CommitRecord, NextStage, StageSpec
from infra.store.storage import Storage, check_unchanged, open_storage
from infra.store.work_channel import Cause, JobProblem, WorkChannel
from infra.tracking.journal import Journal, read_journal
from infra.waiting import FULL_DISK, ROOM, when_there_is_room

EXIT_FAILURE = 1
_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|\bMemoryError\b", re.I)
DEADLINES_S = {
    "load": 3600.0,
    "preprocess": 6 * 3600.0,
    "merge": 7200.0,
    "evaluate": 7200.0,
    "publish": 7200.0,
}
"""Seconds without progress after which a phase counts as hanging, unless the recipe sets others."""

Config = TypeVar("Config", bound=StageConfig, covariant=True)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobContext(Generic[Config]):
    """Configuration, inputs, directories and records of one attempt, for the job's body.

    Attributes:
        journal: metrics and progress, including those of earlier attempts.
        clock: wall time in seconds by phase, for the commit record.
        attempt_dir: this attempt's local directory for logs and intermediate files.
        steps_dir: step checkpoints, shared by the attempts of one generation.
        check_held: raises `FencedError` if another attempt took over. A remote store that does not
            answer is ignored: a checkpoint is then published locally, and the thread that uploads
            it checks again.
    """

    spec: StageSpec
    config: Config
    storage: Storage
    journal: Journal
    heartbeat: Heartbeat
    clock: PhaseClock
    attempt_dir: Path
    steps_dir: Path
    check_held: Callable[[], None]

    def input(self, name: str) -> Path:
        """Return the verified, read-only local path of an input; raise ConfigError if not given."""
        artifact = self.spec.inputs.get(name)
        if artifact is None:
            given = ", ".join(sorted(self.spec.inputs)) or "none"
            raise ConfigError(f"inputs.{name}", f"missing; need an artifact; given: {given}")
        return self.storage.local_copy(artifact)

    def optional_input(self, name: str) -> Path | None:
        """Return the path of an input, or None if it was not given."""
        return self.input(name) if name in self.spec.inputs else None

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[None]:
        """Check before and after the block that external inputs are as planned.

        Raise `ArtifactCorruptError` if one changed, also if the block fails with a `ConfigError`,
        since the change is then the cause. Files with unchanged times are not hashed again.
        """
        artifacts = [self.spec.inputs[name] for name in names]
        _check_all_unchanged(artifacts)
        try:
            yield
        except ConfigError:
            _check_all_unchanged(artifacts)
            raise
        _check_all_unchanged(artifacts)

    @property
    def output_dir(self) -> Path:
        """Directory whose files are published at the end; empty at the start."""
        return self.attempt_dir / "output"


def _check_all_unchanged(artifacts: Iterable[Artifact]) -> None:
    for artifact in artifacts:
        check_unchanged(artifact)


@dataclass(frozen=True)
class JobOutput:
    """Result of a job's body; `digests` are known SHA-256 by name of files in `output_dir`."""

    kind: str
    metrics: dict[str, float]
    digests: Mapping[str, str] = field(default_factory=dict)


Body = Callable[[JobContext[Config]], JobOutput]


def run_job(config_type: type[Config], body: Body[Config]) -> NoReturn:
    """Run one job, then a stage that it claimed, and end the process with the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    end_output = redact_output()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    began_at = min(time.time(), psutil.Process().create_time())
    code, claimed = _run_attempt(sys.argv, began_at, (config_type, body))
    if claimed is not None:
        gc.collect()  # frees the engines of the previous stage
        # Only the imports are shared; everything else is as in a new process.
        code, _ = _run_attempt(claimed.job_argv[2:], time.time())
    end_output()
    raise SystemExit(code)


def _run_attempt(
    argv: list[str], began_at: float, job: tuple[type[Any], Body[Any]] | None = None
) -> tuple[int, StageSpec | None]:
    """Run one attempt and record its error; return exit code and claimed next stage."""
    report: Callable[[JobProblem], None] | None = None
    try:
        if len(argv) != 4 or not argv[3].isdigit():
            raise ConfigError("argv", f"got {argv[1:]}; need STORE FINGERPRINT ATTEMPT")
        storage, attempt = open_storage(argv[1]), int(argv[3])
        channel = storage.channel(argv[2])
        spec = channel.read_specification(attempt)
        report = partial(channel.write_error, attempt)
        config_type, body = job or importlib.import_module(spec.job_module).JOB
        return 0, _run(storage, channel, spec, config_type, body, began_at)
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
    if report is not None:
        report(job_problem(problem, code))
    return code, None


def _run(
    storage: Storage,
    channel: WorkChannel,
    spec: StageSpec,
    config_type: type[Config],
    body: Body[Config],
    began_at: float,
) -> StageSpec | None:
    """Run a job from its specification to the commit of its output; return a claimed stage."""
    config = config_type.validated(spec.config, "config")
    config.check()
    runtime = Runtime.validated(spec.runtime, "runtime")
    refuse_changed_code(spec.sources, spec.libraries)
    if (replicas := config.rollout_interpreter) is not None:
        refuse_other_libraries(spec.rollout_libraries, replicas, "the rollout replicas")
    for broken in import_external_modules():
        logger.warning("%s", broken)
    attempt = Attempt(spec.fingerprint, spec.attempt, spec.holder)
    storage.attempts.check(attempt)
    if channel.read_error(spec.attempt) is not None:
        raise FencedError(f"attempt {spec.attempt} of {spec.stage} was given up before it began")
    clock = PhaseClock()
    clock.add("load", time.time() - began_at)
    with ExitStack() as stack, _fenced_before_failed(storage, attempt):
        context = _open_context(stack, storage, channel, attempt, spec, config, runtime, clock)
        # Noted after a phase of the clock, which is more specific.
        stack.push(lambda *raised: note_phase(context.heartbeat.phase, *raised))
        output = body(context)
        context.heartbeat.enter("publish", DEADLINES_S["publish"])
        num_bytes = sum(path.stat().st_size for path in context.output_dir.rglob("*"))
        with clock("save"):
            artifact = when_there_is_room(
                lambda: storage.publish(context.output_dir, output.kind, output.digests),
                f"{storage.uri}, for {num_bytes} bytes",
            )
        claimed = _claim(storage, spec.then, attempt, artifact) if spec.then else None
        record = CommitRecord(
            fingerprint=spec.fingerprint,
            stage=spec.stage,
            artifact=artifact,
            attempt=spec.attempt,
            adopted=spec.adopted,
            metrics=output.metrics,
            seconds={**clock.seconds, "total": time.time() - began_at},
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        when_there_is_room(lambda: storage.commit(attempt, record), storage.uri)
        _prune(storage, channel, attempt)
    logger.info("stage %s committed %s", spec.stage, artifact.digest)
    return claimed


@contextmanager
def _fenced_before_failed(storage: Storage, attempt: Attempt) -> Iterator[None]:
    """Raise `FencedError` in place of an error if the attempt was replaced.

    An attempt that slept until a newer one committed finds its work files removed.
    """
    try:
        yield
    except (OSError, PipelineError):
        storage.attempts.check(attempt)
        raise


def _claim(
    storage: Storage, stage: NextStage, before: Attempt, output: Artifact
) -> StageSpec | None:
    """Hold the first attempt of the next stage before the output is visible to others.

    Returns None if the stage is done, held by another, needs other code, or if the store fails:
    this must not fail the current stage.
    """
    fingerprint = next_fingerprint(stage, output)
    made = {output.kind: output.model_copy(update={"fingerprint": before.fingerprint})}
    claimed = stage.spec.model_copy(
        update={"fingerprint": fingerprint, "inputs": stage.spec.inputs | made}
    )
    try:
        refuse_changed_code(claimed.sources, claimed.libraries)
        storage.attempts.check(before)
        own = storage.attempts.entries(before.fingerprint)[before.number].holder
        holder = own.model_copy(update={"id": claimed.holder, "process": own_stamp()})
        storage.runs.use(stage.run_key, fingerprint)  # protects it from garbage collection
        storage.attempts.hold(fingerprint, holder, claimed.attempt)
        storage.channel(fingerprint).write_specification(claimed)
        if before.fingerprint in storage.attempts.followed_by(stage.follower):
            storage.attempts.join(fingerprint, stage.follower)  # until the follower joins itself
    except (PipelineError, OSError) as error:
        logger.info("stage %s gets a job of its own, not this one: %s", claimed.stage, error)
        return None
    return claimed


def _prune(storage: Storage, channel: WorkChannel, committed: Attempt) -> None:
    """Remove a committed stage's step checkpoints and work files; errors are only logged."""
    *held, _ = storage.attempts.generation(committed.fingerprint, committed.number)
    try:
        channel.prune(
            [entry.number for entry in held], channel.steps_dir(held[0].number, held[0].adopted)
        )
    except OSError as error:
        logger.warning("the working files of a committed stage stay: %s", error)


def _open_context(
    stack: ExitStack,
    storage: Storage,
    channel: WorkChannel,
    attempt: Attempt,
    spec: StageSpec,
    config: Config,
    runtime: Runtime,
    clock: PhaseClock,
) -> JobContext[Config]:
    """Open the attempt's directory, heartbeat and journal; the stack closes them."""
    directory = channel.local_dir(spec.attempt)
    stacks = stack.enter_context((directory / "stacks.txt").open("w", encoding="utf-8"))
    heartbeat = Heartbeat(
        directory / "heartbeat",
        runtime.heartbeat_s,
        partial(_end_stalled, channel, spec.attempt),
        stacks,
        deadlines_s=runtime.progress_deadlines_s,
    )
    stack.enter_context(heartbeat).enter("load", DEADLINES_S["load"])
    earlier, _ = read_journal(storage, spec.fingerprint)
    journal = Journal(directory / "journal.jsonl", earlier, spec.adopted)
    stack.callback(journal.close)
    steps_dir = channel.steps_dir(
        storage.attempts.generation(spec.fingerprint)[0].number, spec.adopted
    )
    fence = partial(storage.attempts.check, attempt)
    fence()  # checked after reading the journal, so no later step in it is from another attempt
    channel.share_steps(spec.attempt, steps_dir, journal.num_done, fence)
    check_held = partial(storage.attempts.check_if_reachable, attempt)
    context = JobContext(
        spec, config, storage, journal, heartbeat, clock, directory, steps_dir, check_held
    )
    shutil.rmtree(context.output_dir, ignore_errors=True)
    context.output_dir.mkdir()
    return context


def _end_stalled(channel: WorkChannel, attempt: int, stall: Stall) -> None:
    """End a job that hangs; called from the heartbeat's thread."""
    at = f" after step {stall.step}" if stall.step is not None else ""
    directory = channel.local_dir(attempt)
    with (
        suppress(OSError),
        (directory / "stacks.txt").open("a", encoding="utf-8") as file,
    ):
        file.write(f"\n{ask_for_stacks(directory)}")
    problem = JobProblem(
        type="NoProgressError",
        message=f"no progress in phase {stall.phase}{at} for {stall.deadline_s:g} s; the stacks "
        f"of all threads, here and of every rank and replica, are in {directory / 'stacks.txt'}; "
        f"if it only is slow, raise progress_deadlines_s.{stall.phase}",
        exit_code=EXIT_FAILURE,
        cause="hang",
        phase=stall.phase,
    )
    with suppress(OSError):  # a full disk must not keep it alive
        channel.write_error(attempt, problem)
    sys.stderr.write(f"{problem.message}\n")
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(EXIT_FAILURE)


def _terminate(signum: int, frame: object) -> NoReturn:
    """Exit through every `finally`, so that children and files are cleaned up."""
    # A second signal would interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(EXIT_TERMINATED)


def job_problem(error: BaseException, exit_code: int) -> JobProblem:
    """Return what a failed job reports: cause, phase and measured sizes."""
    cause, phase, said = _cause(error), phase_of(error), redact(str(error))
    at = f" in phase {phase}" if phase else ""
    if cause == "out_of_memory":
        own, children = (
            resource.getrusage(who).ru_maxrss * 1024
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        said = (
            f"out of memory{at}: {said or type(error).__name__}; at its peak this process held "
            f"{own:,} bytes, the largest of its children {children:,}"
        )
    elif cause == "disk_full":
        said = f"disk full{at}: {said}{_free(error)}; free space there, then run again to resume"
    return JobProblem(
        type=type(error).__name__, message=said, exit_code=exit_code, cause=cause, phase=phase
    )


def phase_of(error: BaseException) -> str:
    """Return the innermost phase noted in an error; empty if none was noted."""
    notes = getattr(error, "__notes__", ())
    return next((n.removeprefix(PHASE_NOTE) for n in notes if n.startswith(PHASE_NOTE)), "")


def _cause(error: BaseException | None) -> Cause:
    while error is not None:
        waited_for = error.waited_for if isinstance(error, DeadlineError) else ""
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        if is_full or waited_for.startswith(ROOM):
            return "disk_full"
        if isinstance(error, NonFiniteError):
            return "non_finite"
        # Also by text: each device library has its own error class; a rank's error is text.
        says_so = isinstance(error, RuntimeError | WorkerError) and _MEMORY.search(str(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM or says_so:
            return "out_of_memory"
        if isinstance(error, WorkerError):
            return "hang" if "no heartbeat" in str(error) else "dead_rank"
        if re.search(r" on rank \d", waited_for):
            return "hang"
        error = error.__cause__
    return ""


def _free(error: BaseException) -> str:
    """Return a text about the free space of the disk of the error's file, if known."""
    named = getattr(error, "filename", None)
    place = next((p for p in Path(str(named)).parents if p.exists()), None) if named else None
    return f"; {shutil.disk_usage(place).free:,} bytes are free at {place}" if place else ""
