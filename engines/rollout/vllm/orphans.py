"""Ends vLLM's processes with the process that started them.

When its parent is killed, vLLM 0.32's engine process waits forever and keeps its device memory.
vLLM calls `watch_parent` in each of its processes, as a plugin of `vllm.general_plugins`.
"""

import multiprocessing
import os
import signal
import threading


def watch_parent() -> None:
    """Kill this process when its parent is gone; no-op if multiprocessing did not start it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
