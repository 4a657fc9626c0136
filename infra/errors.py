"""The root of the exception tree, and the errors of the floor that stores and runs things.

    PipelineError                     everything this project raises on purpose
    ├── ConfigError                   the user's input is wrong: one line, exit code 2
    │   └── UnknownPluginError        no part of that name; lists what there is
    ├── ArtifactError
    │   ├── ArtifactNotFoundError     nothing was published under that name
    │   └── ArtifactCorruptError      it was published, and does not verify now
    ├── StoreError                    a store elsewhere refused, and says nothing of what it holds
    │   ├── StoreDeniedError          it does not let us
    │   └── StoreUnreachableError     no answer, or a failure of its own
    ├── NotExclusiveError             another may be where only one may be
    ├── FencedError                   another attempt took over; this one must not commit
    ├── JournalError                  a journal is damaged before its last record
    ├── JobError
    │   ├── JobFailedError            the Ray job ended without its output
    │   └── JobSubmitError            Ray refused the job, or cannot be reached
    ├── SickRunError                  a round shows what the recipe says ends the run
    ├── ServiceError                  a server we start or need does not answer
    └── DeadlineError                 a wait ran out; says what it waited for

`engines.errors` continues the tree for the data plane. An `OSError` that is not
"file not found" is never translated: a failing disk must not look like a missing file.
"""

import signal

EXIT_USER_ERROR = 2
"""Exit code of every process that stops because of a `ConfigError`."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit code of every process that was told to end and left in order."""


class PipelineError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(PipelineError):
    """The user's input is wrong.

    Its text is one line: ``path.to.field: got X; need Y; do Z``. The parts may be omitted
    where they add nothing, the path may not.

    Args:
        path: where the value stands, as the user wrote it (``rl.group_size``, ``train.jsonl:7``).
        problem: what is wrong and what to do about it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {' '.join(problem.split())}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str]]:
        return (ConfigError, (self.path, self.problem))


class UnknownPluginError(ConfigError):
    """No part of that name is in its table; the text lists those that are."""


class ArtifactError(PipelineError):
    """Base of the errors about published artifacts."""


class ArtifactNotFoundError(ArtifactError):
    """Nothing was published under that name."""


class ArtifactCorruptError(ArtifactError):
    """A published artifact no longer verifies: names the file and both digests."""


class StoreError(PipelineError, OSError):
    """A store elsewhere did not do what it was asked: as a failing disk, it is no absence."""


class StoreDeniedError(StoreError):
    """The store does not let us, or does not know us; names the credentials' way."""


class StoreUnreachableError(StoreError):
    """The store gave no answer, or one that says that it failed; asking later may help."""


class NotExclusiveError(PipelineError):
    """Others may be at work where only one may be; what was done until then stands."""


class FencedError(PipelineError):
    """Another attempt of the stage took over, so this one must not commit."""


class JournalError(PipelineError):
    """A journal is damaged where a killed writer cannot have damaged it; names the byte."""


class JobError(PipelineError):
    """Base of the errors about Ray jobs."""


class JobFailedError(JobError):
    """A Ray job ended without publishing its output; carries the tail of its log."""


class JobSubmitError(JobError):
    """Ray refused a job or cannot be reached."""


class SickRunError(PipelineError):
    """A finished round shows a symptom that the recipe says ends the run; names it."""


class ServiceError(PipelineError):
    """A server that we start or need does not answer."""


class DeadlineError(PipelineError):
    """A wait ran out of time.

    Args:
        waited_for: what did not happen, in words.
        deadline_s: how long the wait was, in seconds.
    """

    def __init__(self, waited_for: str, deadline_s: float) -> None:
        super().__init__(f"gave up after {deadline_s:g} s waiting for {waited_for}")
        self.waited_for = waited_for
        self.deadline_s = deadline_s

    def __reduce__(self) -> tuple[type["DeadlineError"], tuple[str, float]]:
        return (DeadlineError, (self.waited_for, self.deadline_s))
