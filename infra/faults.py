"""Named points where a test can make a process fail.

`fault(point)` does nothing unless the variable RLHF_FAULTS arms that point::

    RLHF_FAULTS="atomic.before_publish=kill"         SIGKILL at the first pass
    RLHF_FAULTS="journal.after_write=kill@3"         at the third pass
    RLHF_FAULTS="a.b=sleep:2.5,c.d=enospc"           several at once

Passes are counted per value of the variable: a new value starts the count again.
Actions: kill, stop (SIGSTOP), exit, raise, eio, enospc, memory:BYTES (allocates that many),
sleep:SECONDS, and nan, which only makes `fault` return True; the caller then corrupts its value.
Promises: `POINTS` lists all points; a test compares it with the source.
"""

import errno
import logging
import os
import signal
import time
from collections import Counter

from infra import env
from infra.errors import ConfigError, PipelineError

POINTS: dict[str, str] = {
    "atomic.before_rename": "a file's new content is written, its old content still visible",
    "atomic.before_link": "a file is written, its name not yet taken",
    "atomic.before_publish": "a directory is durable, still under its temporary name",
    "atomic.after_publish": "a directory has its visible name, its parent is not yet durable",
    "artifacts.before_manifest": "all files are hashed, the manifest is not yet written",
    "storage.during_copy": "a copy into the store is half done",
    "storage.before_manifest": "an artifact's files are in a bucket, its manifest is not",
    "stage_log.before_hold": "an attempt is about to be claimed",
    "storage.before_publish": "a job's files are complete, none of them is in the store",
    "storage.before_commit": "an artifact is published, its fingerprint not yet committed",
    "journal.before_write": "a record is due and not yet written",
    "weights.bucket_read": "a rollout engine holds some of new weights, and has not said so",
    "garbage.taken": "something lost its name in the store, and is not removed yet",
    "server.before_start": "a server's record is written, the server does not run yet",
    "server.before_record": "a server runs, its record does not name its process yet",
    "server.recorded": "a server runs and is recorded; it may not answer yet",
    "server.ready": "the Ray head can take jobs, the starter has not returned yet",
    "journal.after_write": "a record is written and not yet durable",
    "rl.critic_updated": "the critic took its updates of a step, the policy none of its own",
    "sglang.embedding": "new weights are loaded, the embedding is the old one (nan: it stays)",
    "sglang.cache_flush": "weights are loaded, the cache is of the old ones (nan: it stays)",
    "vllm.head_refresh": "new weights are loaded, the output head is the old one (nan: it stays)",
    "vllm.prefix_reset": "weights are loaded, the prefix cache is of the old ones (nan: it stays)",
}

_ACTIONS = frozenset({"kill", "stop", "exit", "raise", "eio", "enospc", "memory", "sleep", "nan"})
_passes: Counter[tuple[str, str]] = Counter()


class InjectedFaultError(PipelineError):
    """Raised by the action `raise`; never seen outside tests."""


def fault(point: str) -> bool:
    """Fail here if a test armed this point; True if the caller should corrupt its value (`nan`).

    `point` is a name in `POINTS`, written as a literal.
    """
    setting = env.RLHF_FAULTS.get()
    armed = _parse(setting).get(point) if setting else None
    if setting is None or armed is None:
        return False
    action, argument, at_pass = armed
    _passes[setting, point] += 1
    if _passes[setting, point] != at_pass:
        return False
    logging.getLogger(__name__).warning("fault injected at %s: %s", point, action)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(int(argument or 1))
        case "raise":
            raise InjectedFaultError(f"injected at {point}")
        case "eio" | "enospc":
            raise OSError(getattr(errno, action.upper()), f"injected at {point}")
        case "memory":
            bytearray(int(argument))
        case "sleep":
            time.sleep(float(argument or 1))
    return action == "nan"


def _parse(setting: str) -> dict[str, tuple[str, str, int]]:
    """Return action, argument and pass of every armed point."""
    armed = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        point, _, rest = entry.partition("=")
        rest, _, at_pass = rest.partition("@")
        action, _, argument = rest.partition(":")
        if point not in POINTS:
            raise ConfigError(
                f"environment.{env.RLHF_FAULTS.name}",
                f"no fault point {point!r}; known: {', '.join(sorted(POINTS))}",
            )
        if action not in _ACTIONS or (at_pass and not at_pass.isdigit()):
            raise ConfigError(
                f"environment.{env.RLHF_FAULTS.name}",
                f"got {entry!r}; need POINT=ACTION[:ARGUMENT][@PASS], "
                f"ACTION one of {', '.join(sorted(_ACTIONS))}",
            )
        armed[point] = (action, argument, int(at_pass or 1))
    return armed
