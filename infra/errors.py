"""The root of the exception tree, and the errors of `infra`; `engines.errors` continues it.

`on_failure` undoes or records what an exception interrupts.

    PipelineError                     base of the errors here and in `engines.errors`
    ├── ConfigError                   invalid user input: one line, exit code 2
    │   └── UnknownPluginError        no plugin of that name; lists the known names
    ├── ArtifactError
    │   ├── ArtifactNotFoundError     nothing was published under that name
    │   └── ArtifactCorruptError      files do not match their manifest, or a record is damaged
    ├── StoreError                    a remote store failed; says nothing about its content
    │   ├── StoreDeniedError          permission denied
    │   └── StoreUnreachableError     no answer, or an error of the service
    ├── NotExclusiveError             exclusive access cannot be guaranteed
    ├── FencedError                   another attempt took over; this one must not commit
    ├── JournalError                  a journal is damaged before its last record
    ├── JobError
    │   ├── JobFailedError            the Ray job ended without its output
    │   └── JobSubmitError            Ray refused the job, or cannot be reached
    ├── SickRunError                  a round has a symptom that ends the run (diagnosis.end_run)
    ├── ServiceError                  a server or helper process that is needed fails
    └── DeadlineError                 a deadline passed; says what was waited for

An `OSError` other than "file not found" never becomes an error about missing data: a failing disk
must not look like a missing file.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

EXIT_USER_ERROR = 2
"""Exit code of a process that stops because of a `ConfigError`."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that shut down cleanly after SIGTERM."""


class PipelineError(Exception):
    """Base of the errors that end a command with one text instead of a traceback."""


class ConfigError(PipelineError):
    """Invalid user input; the process exits with code 2.

    The text is one line: ``path.to.field: got X; need Y; do Z``. All but the path may be omitted.
    The path is as the user wrote it (``rl.group_size``, ``train.jsonl:7``).
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {' '.join(problem.split())}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str]]:
        return (ConfigError, (self.path, self.problem))


def refuse(is_refused: object, path: str, problem: str) -> None:
    """Raise `ConfigError` if the condition is true. `problem` has to be valid text in any case."""
    if is_refused:
        raise ConfigError(path, problem)


class UnknownPluginError(ConfigError):
    """No plugin of that name exists; the text lists the known names."""


class ArtifactError(PipelineError):
    """Base of the errors about published artifacts."""


class ArtifactNotFoundError(ArtifactError):
    """No artifact was published under that name."""


class ArtifactCorruptError(ArtifactError):
    """An artifact or a record of the store is damaged or lost; the text names the file."""


class StoreError(PipelineError, OSError):
    """A remote store failed an operation; only its `AbsentError` means that an object is absent."""


class StoreDeniedError(StoreError):
    """The store rejected the credentials or the access; the text says how to set credentials."""


class StoreUnreachableError(StoreError):
    """The store did not answer or reported an internal failure; a retry may succeed."""


class NotExclusiveError(PipelineError):
    """Exclusive access is not guaranteed; what was done before the error remains in effect."""


class FencedError(PipelineError):
    """Another attempt of the stage took over, so this one must not commit."""


class JournalError(PipelineError):
    """A journal has damage that a killed writer cannot cause; the text names the byte."""


class JobError(PipelineError):
    """Base of the errors about Ray jobs."""


class JobFailedError(JobError):
    """A job ended without publishing its output; the text has the reason or its log's tail."""


class JobSubmitError(JobError):
    """Ray refused a job or cannot be reached."""


class SickRunError(PipelineError):
    """A finished round shows a symptom that the recipe declares fatal; the text names it."""


class ServiceError(PipelineError):
    """A server or helper process that this project needs fails or does not answer."""


class DeadlineError(PipelineError):
    """A wait for `waited_for` (in words) ran out of time."""

    def __init__(self, waited_for: str, deadline_s: float) -> None:
        super().__init__(f"gave up after {deadline_s:g} s waiting for {waited_for}")
        self.waited_for = waited_for
        self.deadline_s = deadline_s

    def __reduce__(self) -> tuple[type["DeadlineError"], tuple[str, float]]:
        return (DeadlineError, (self.waited_for, self.deadline_s))


@contextmanager
def on_failure(act: Callable[[BaseException], object]) -> Iterator[None]:
    """Scope that calls `act` with any exception that leaves it; the exception goes on."""

    def left(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            act(error)

    with ExitStack() as stack:
        stack.push(left)
        yield
