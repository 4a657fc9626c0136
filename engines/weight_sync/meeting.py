"""Where the sender of weights and its receivers meet, and hear that one of them gave up.

Promises: whoever waits here ends when anyone gave up, with the words of the first who did; every
wait has a deadline. Keys stand behind a random token, so that two transfers never mix.
Does not keep out who reaches the store and looks for the token: it listens where Ray does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import PrefixStore, Store

from engines.errors import WeightSyncError
from engines.key_value_store import connect_store
from infra.errors import DeadlineError, PipelineError

POLL_S = 0.001
WATCH_S = 0.05
"""Between two looks at whether anybody gave up."""
FAILED = "failed"


class Meeting:
    """One process's view of the meeting.

    Args:
        store: of the transfer alone.
        error: raised when somebody gave up.
        failures: where that is said, if not in `store`.
    """

    def __init__(
        self,
        store: Store,
        error: type[WeightSyncError] = WeightSyncError,
        failures: Store | None = None,
    ) -> None:
        self.store = store
        self.error = error
        self._failures = store if failures is None else failures

    def lane(self, number: int) -> "Meeting":
        """A part of the meeting with words of its own; who gives up there does so everywhere."""
        return Meeting(PrefixStore(f"lane {number}", self.store), self.error, self._failures)

    def say(self, key: str, text: str = "") -> None:
        """Tell the others something, once."""
        with self._reached():
            self.store.set(key, text)

    def count(self, key: str) -> int:
        """How often this was asked for, this time included."""
        with self._reached():
            return self.store.add(key, 1)

    def fail(self, sentence: str) -> None:
        """Give up; the first to do so is the one that the others name."""
        with self._reached():
            self._failures.compare_set(FAILED, "", sentence)

    def check(self) -> None:
        """Raise the error if anybody gave up."""
        with self._reached():
            found = self._failures.check([FAILED]) and self._failures.get(FAILED).decode()
        if found:
            raise self.error(found)

    def wait(self, key: str, what: str, timeout_s: float) -> str:
        """What somebody says.

        Args:
            key: of it.
            what: is waited for, in words.
            timeout_s: how long.

        Returns:
            What was said.

        Raises:
            WeightSyncError: somebody gave up; of the class that this view was made with.
            DeadlineError: nobody said it.
        """
        start = looked_at = time.monotonic()
        while True:
            with self._reached():
                if self.store.check([key]):
                    return self.store.get(key).decode()
            now = time.monotonic()
            if now > looked_at + WATCH_S:
                self.check()
                looked_at = now
            if now > start + timeout_s:
                raise DeadlineError(what, timeout_s)
            time.sleep(POLL_S)

    @contextmanager
    def telling(self, who: str, what: str) -> Iterator[None]:
        """Tell the others when the block fails.

        Args:
            who: fails, in words.
            what: it did, in words.
        """
        try:
            yield
        except PipelineError as error:
            self.fail(f"{who}: {error}")
            raise
        except BaseException:
            self.fail(f"{who} gave up while it {what}")
            raise

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.error(f"the store of the transfer is gone: {first_line(error)}") from error


def attend(host: str, port: int, token: str, error: type[WeightSyncError]) -> tuple[Meeting, str]:
    """Come to a meeting that another process opened.

    Args:
        host: of its store.
        port: as well.
        token: of the transfer.
        error: as in `Meeting`.

    Returns:
        The meeting, and this machine's address as it is seen there.

    Raises:
        WeightSyncError: it is over; of the class `error`.
    """
    try:
        store, address = connect_store(host, port)
    except (OSError, RuntimeError) as problem:
        what = f"the transfer of weights at {host}:{port} is over: {first_line(problem)}"
        raise error(what) from problem
    return Meeting(PrefixStore(token, store), error), address


def first_line(error: BaseException) -> str:
    """What torch says, without its stack."""
    return str(error).partition("\n")[0]
