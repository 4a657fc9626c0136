"""Many files sent or fetched, several at a time.

Promises: the first failure, whichever file it is of, or an interruption, is raised as soon as the
transfers that are under way have ended; those that were not begun never are.
Does not promise: to cut a transfer that is under way.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

NUM_TRANSFERS = 4


def transfer(transfers: Iterable[Callable[[], None]]) -> None:
    """Make transfers, `NUM_TRANSFERS` at a time, begun in their order.

    Args:
        transfers: each is called once; its exceptions end them all.

    Raises:
        Exception: the first one of a transfer.
    """
    is_over = threading.Event()
    with ThreadPoolExecutor(NUM_TRANSFERS, "transfer") as pool:
        begun = [pool.submit(partial(_make, each, is_over)) for each in transfers]
        try:
            for each in as_completed(begun):
                each.result()
        finally:
            is_over.set()


def _make(one: Callable[[], None], is_over: threading.Event) -> None:
    if is_over.is_set():
        return
    try:
        one()
    except BaseException:
        is_over.set()  # here: whoever waits for the results wakes later than the next one begins
        raise
