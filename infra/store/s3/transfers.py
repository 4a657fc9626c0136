"""Many files sent or fetched, several at a time.

Promises: the first failure, whichever file it is of, or an interruption, is raised as soon as the
transfers that are under way have ended; those that were not begun never are.
Does not promise: to cut a transfer that is under way.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

NUM_TRANSFERS = 4


def transfer(transfers: Iterable[Callable[[], None]]) -> None:
    """Make transfers, `NUM_TRANSFERS` at a time, begun in their order.

    Args:
        transfers: each is called once; its exceptions end them all.
    """
    with ThreadPoolExecutor(NUM_TRANSFERS, "transfer") as pool:
        begun = [pool.submit(each) for each in transfers]
        try:
            for each in as_completed(begun):
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
