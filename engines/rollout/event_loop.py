"""The one event loop of a process that serves, in a thread of its own.

Promises: everything that belongs to it is called from that thread alone; a call from outside
ends with the coroutine's result or error, or at its deadline, and a coroutine that nobody waits
for any more is cancelled.
Does not promise: to interrupt a coroutine that blocks the loop.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from infra.errors import DeadlineError

T = TypeVar("T")
STOP_DEADLINE_S = 10.0


class EventLoopThread:
    """A running loop.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a coroutine that blocks for ever must not keep a job alive that has ended.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for it; from any other thread.

        Args:
            coroutine: to run.
            what: it is, for the error line.
            timeout_s: deadline.

        Returns:
            Its result.

        Raises:
            DeadlineError: it was not done; it is cancelled.
        """
        return self.wait(self.start(coroutine), what, timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, for `wait`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, future: Future[T], what: str, timeout_s: float) -> T:
        """Wait for what `start` started; as `run`."""
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineError(what, timeout_s) from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread; harmless when repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_DEADLINE_S)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_others())
        finally:
            self._loop.close()


async def _end_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
