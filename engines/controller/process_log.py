"""Log files of processes that Ray started: a rank, or a replica of a rollout engine."""

import faulthandler
import logging
from pathlib import Path

from infra.host.stacks import leave_stacks_on_signal
from infra.redact import RedactingFilter, redact_output

NUM_LOG_LINES = 20


def log_to(path: Path) -> None:
    """Append this process's log to a file, and its thread stacks on a crash or on request."""
    redact_output()
    # Line buffered and kept open: the crash handler writes to this descriptor.
    file = path.open("a", buffering=1, encoding="utf-8")
    faulthandler.enable(file)
    leave_stacks_on_signal(file, path)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(RedactingFilter())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def log_tail(path: Path, who: str) -> str:
    """Return the last lines of a log, each prefixed with `who`; empty if there is no file."""
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
    return "".join(f"\n  {who} | {line}" for line in lines)
