"""Removes secrets from texts written for people: logs, errors, reports, output of processes.

A secret is the value of an environment variable with a telling name, or has a known form (tokens
of well-known services, PEM keys, passwords in URLs). Others are not found.

`redact_output` inserts a small filter process into standard output and error of this process, so
that native code and children are covered too. It redacts line by line.
Promises: output is not lost when this process is killed, because the filter reads to the end; an
unterminated line is passed on when the streams close, or at 64 KiB.
Does not promise: to recognise a secret that is split across lines.
"""

import contextlib
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Collection

from infra import env

MASK = "***"
_END_DEADLINE_S = 5.0
_READ_BYTES = 1 << 16
_STREAMS = (1, 2)

_NAME_PARTS = frozenset(
    {
        *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "APIKEY"),
        *("CREDENTIAL", "CREDENTIALS", "PGPASSWORD", "PWD", "PAT"),
    }
)
_MIN_LENGTH = 6
"""Shorter values (`1`, `true`, `none`) are not masked, as they occur everywhere in a text."""

_VALUE_PATTERNS = (
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\bhooks\.slack\.com/services/[A-Za-z0-9/]{10,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.S),
)
_URL_PASSWORD = re.compile(r"(?P<keep>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)")
_CONTEXT_PATTERNS = (
    # Only the text after `keep` is masked.
    re.compile(r"(?i)(?P<keep>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    _URL_PASSWORD,
)


def redact(text: str) -> str:
    """Replace the secrets that are recognized in `text` by `***`."""
    values = {v for v in env.secrets(_NAME_PARTS).values() if len(v) >= _MIN_LENGTH}
    for value in sorted(values, key=len, reverse=True):  # a shorter one must not split a longer one
        text = text.replace(value, MASK)
    for pattern in _VALUE_PATTERNS:
        text = pattern.sub(MASK, text)
    for pattern in _CONTEXT_PATTERNS:
        text = pattern.sub(rf"\g<keep>{MASK}", text)
    return text


def looks_secret(value: str) -> bool:
    """True if a value has the form of a secret."""
    return any(pattern.search(value) for pattern in (*_VALUE_PATTERNS, _URL_PASSWORD))


class RedactingFilter(logging.Filter):
    """Redacts log records in place. Attach it to handlers: loggers do not filter their children."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact message, traceback and stack of a record; always returns True."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # Format and arguments do not match; log both as they are.
            message = f"{record.msg} {record.args}"
        record.msg = redact(message)
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


def environment_of_user_code(passed: Collection[str] = (), **extra: str | None) -> dict[str, str]:
    """Return `env.child_environment(**extra)` without secrets other than those in `passed`."""
    withheld = env.secrets(_NAME_PARTS, looks_secret).keys() - {*passed}
    return env.child_environment(**{**dict.fromkeys(withheld), **extra})


def redact_output() -> Callable[[], None]:
    """Redact the output of this process and its later children; return a function that ends it.

    That function waits up to five seconds for pending output, then directs both streams to
    /dev/null.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = [(stream, *os.pipe(), os.dup(stream)) for stream in _STREAMS]
    passed = [fd for _, read, _, original in pipes for fd in (read, original)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *map(str, passed)],
        stdin=subprocess.DEVNULL,
        pass_fds=passed,
        process_group=0,
        env=env.child_environment(),
    )
    for stream, read, write, original in pipes:
        os.dup2(write, stream)
        for descriptor in (read, write, original):
            os.close(descriptor)

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in _STREAMS:
            os.dup2(nothing, stream)
        os.close(nothing)
        # A child that outlives this process keeps the pipe open; its output is still redacted.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_DEADLINE_S)

    return end


def main(arguments: list[str]) -> int:
    """Copy from read to write descriptors, given as pairs, until all reads reach end of file."""
    # Stopping a job signals all of its processes; the last output arrives after the signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptors = [int(argument) for argument in arguments]
    selector = selectors.DefaultSelector()
    waiting: dict[int, bytes] = {}
    for source, target in zip(descriptors[::2], descriptors[1::2], strict=True):
        selector.register(source, selectors.EVENT_READ, target)
        waiting[source] = b""
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, _READ_BYTES)
            head, newline, rest = (waiting[key.fd] + data).rpartition(b"\n")
            waiting[key.fd] = rest
            if not data or len(rest) > _READ_BYTES:
                head, newline, waiting[key.fd] = head + newline + rest, b"", b""
            text = redact((head + newline).decode("utf-8", "surrogateescape"))
            clean = memoryview(text.encode("utf-8", "surrogateescape"))
            # On a full disk the log is lost; the job must not fail with a broken pipe.
            with contextlib.suppress(OSError):
                while clean:
                    clean = clean[os.write(key.data, clean) :]
            if not data:
                selector.unregister(key.fd)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
