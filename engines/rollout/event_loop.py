"""An event loop in a thread of its own, for a process that serves.

Promises: a call from another thread ends with the coroutine's result or error, or at its deadline;
a coroutine whose caller stopped waiting is cancelled.
Does not promise: to interrupt a coroutine that blocks the loop.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from infra.waiting import result_within

T = TypeVar("T")
STOP_DEADLINE_S = 10.0


class EventLoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self, name: str) -> None:
        # The factory keeps the new loop from becoming the event loop of this thread.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        # A daemon thread: a coroutine that blocks forever must not keep an ended job alive.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for its result, from any other thread.

        At the deadline it is cancelled, and a DeadlineError names `what`.
        """
        return self.wait(self.start(coroutine), what, timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop; return the future, for `wait`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, future: Future[T], what: str, timeout_s: float) -> T:
        """Wait for what `start` returned; see `run`."""
        try:
            return result_within(future, what, timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread; may be repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_DEADLINE_S)

    def _serve(self) -> None:
        with self._runner:  # at the end it cancels what still runs
            self._loop.run_forever()
