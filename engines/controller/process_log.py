"""The log of a process that Ray started for us: a rank, or a replica of a rollout engine."""

import faulthandler
import logging
from pathlib import Path

from infra.host.stacks import leave_stacks_on_signal
from infra.redact import RedactingFilter
from infra.redacted_output import redact_output

NUM_LOG_LINES = 20


def log_to(path: Path) -> None:
    """Send this process's log to a file, and the stacks of its threads if it crashes or is asked.

    Args:
        path: of the file; appended to.
    """
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
    """The last lines of such a log, for an error.

    Args:
        path: of the file; it may be missing.
        who: it is of.

    Returns:
        One line each, with `who` in front.
    """
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
    return "".join(f"\n  {who} | {line}" for line in lines)
