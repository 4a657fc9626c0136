"""vLLM's processes end with the process that started them.

vLLM 0.32's engine process waits for requests for ever when its parent was killed, and keeps the
memory of its device; its worker waits for the engine process. vLLM calls `watch_parent` in each
of them, as a plugin of the group `vllm.general_plugins`.
Does not promise an orderly end: nobody is left to serve, and the kernel frees what they held.
"""

import multiprocessing
import os
import signal
import threading


def watch_parent() -> None:
    """Kill this process when its parent is gone; does nothing in a process nobody spawned."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
