"""Redacts the standard output and error of a process and its children.

`redact_output` inserts a small filter process into both streams, so that native code and children
are covered too. It redacts line by line.
Promises: output is not lost when this process is killed, because the filter reads to the end; an
unterminated line is passed on when the streams close, or at 64 KiB.
Does not promise: to recognise a secret that is split across lines.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable

from infra import env
from infra.redact import redact

_END_DEADLINE_S = 5.0
_READ_BYTES = 1 << 16
_STREAMS = (1, 2)


def redact_output() -> Callable[[], None]:
    """Redact the output of this process and its later children; return a function that ends it.

    That function waits up to five seconds for pending output, then directs both streams to
    /dev/null.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = [os.pipe() for _ in _STREAMS]
    originals = [os.dup(stream) for stream in _STREAMS]
    pairs = [(read, original) for (read, _), original in zip(pipes, originals, strict=True)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *(str(fd) for pair in pairs for fd in pair)],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd for pair in pairs for fd in pair],
        process_group=0,
        env=env.child_environment(),
    )
    for stream, (read, write) in zip(_STREAMS, pipes, strict=True):
        os.dup2(write, stream)
        os.close(write)
        os.close(read)
    for original in originals:
        os.close(original)

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
            _write(key.data, head + newline)
            if not data:
                selector.unregister(key.fd)
    return 0


def _write(target: int, data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    clean = memoryview(redact(text).encode("utf-8", "surrogateescape"))
    # On a full disk the log is lost; the job must not fail with a broken pipe.
    with contextlib.suppress(OSError):
        while clean:
            clean = clean[os.write(target, clean) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
