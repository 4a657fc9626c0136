"""Everything a process and its children print, without secrets before it reaches a disk.

`redact_output` puts a small process between the standard streams and where they lead: whatever is
written to them, by this process, by native code or by any child that inherited them, passes
through `infra.redact` line by line.
Promises: nothing that was written is lost when this process is killed, for the other one reads on
to the end; a line without an end is passed on when the streams close, or at 64 KiB.
Does not promise: to know a secret that is written in pieces with line ends between them.
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
    """Redact what this process and its later children write to stdout and stderr.

    Returns:
        Ends it: waits, up to five seconds, until all that was written has been passed on. This
        process's streams lead nowhere afterwards.
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
        # A child that outlives us keeps the pipe open; what it writes still arrives redacted.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_DEADLINE_S)

    return end


def main(arguments: list[str]) -> int:
    """Pass on, from pairs of descriptors to read and to write, until all of them have ended."""
    # Whoever stops a job signals all of its processes; the last lines come after that.
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
    # A full disk takes the log, not the job: its writers must never meet a broken pipe.
    with contextlib.suppress(OSError):
        while clean:
            clean = clean[os.write(target, clean) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
