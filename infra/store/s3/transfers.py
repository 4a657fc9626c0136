"""Parallel transfers of many files."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

NUM_TRANSFERS = 4


def transfer(transfers: Iterable[Callable[[], None]]) -> None:
    """Call transfers in order, `NUM_TRANSFERS` at a time.

    The first exception is raised when those in progress have ended; no others are started.
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
        is_over.set()  # here, since the next transfer may start before the waiting caller wakes
        raise
