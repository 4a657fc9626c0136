"""The child process of the engine: SGLang's HTTP server, which ends with the process that owns it.

`python -m engines.rollout.sglang.server_main DIRECTORY`, with the arguments of `ServerArgs` in
`DIRECTORY/arguments.json`. A secret is in the environment, never in the arguments.
Promises: arguments that SGLang refuses are answered by `DIRECTORY/refusal` and an end; when the
owner is gone, however it went, the whole process group is killed within `POLL_S` and what it has
left in memory and in the directory is removed.
Does not promise an orderly end then: nobody is left to serve.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from engines.rollout.sglang.stand_ins import install
from infra import env

ARGUMENTS, REFUSAL = "arguments.json", "refusal"
POLL_S = 0.5
SHARED_MEMORY = "/dev/shm/sglang_"  # noqa: S108  a beginning of names, not a file

# Here and not in `main`: SGLang starts its other processes from this module again, as
# multiprocessing's method "spawn" does, before they import anything of it.
if env.SGLANG_USE_CPU_ENGINE.get():
    install()


def shared_memory_of(pid: int) -> set[Path]:
    """What a server has mapped of `/dev/shm`, which SGLang does not remove when it is killed.

    Args:
        pid: of its first process; it may be gone.

    Returns:
        Files, which may be gone as well.
    """
    found: set[Path] = set()
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error, NotImplementedError):
                found |= {Path(each.path) for each in process.memory_maps()}
    return {path for path in found if str(path).startswith(SHARED_MEMORY)}


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def main() -> None:
    """Serve until the owner ends us, or is gone."""
    directory = Path(sys.argv[1])
    owner = os.getppid()
    threading.Thread(
        target=_end_with, args=(owner, directory), name="watch-owner", daemon=True
    ).start()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = json.loads((directory / ARGUMENTS).read_text(encoding="utf-8"))
    try:
        server_args = _accepted(arguments)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        (directory / REFUSAL).write_text(" ".join(str(error).split()), encoding="utf-8")
        raise
    launch_server(server_args)


def _accepted(arguments: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(**arguments, api_key=env.RLHF_SGLANG_KEY.require())
    made.resolve_once()
    return made


def _end_with(owner: int, directory: Path) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_S)
    remove(shared_memory_of(os.getpid()))
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
