"""The group of one."""

import pytest

from engines.controller.worker_group import Dispatch, InProcessGroup, dispatch


class Counter:
    """A worker that counts."""

    def __init__(self) -> None:
        self.total = 0
        self.num_closed = 0

    @dispatch(Dispatch.ONE_TO_ALL)
    def add(self, amount: int, *, times: int = 1) -> int:
        self.total += amount * times
        return self.total

    @dispatch(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError("as it was raised")

    def undeclared(self) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


def test_every_call_is_a_plain_call() -> None:
    worker = Counter()
    group = InProcessGroup(worker)
    assert group.world_size == 1
    assert group.run(Counter.add, 2, times=3) == 6
    with pytest.raises(KeyError, match="as it was raised"):
        group.run(Counter.fail)
    with pytest.raises(TypeError, match="no @dispatch"):
        group.run(Counter.undeclared)


def test_closing_twice_closes_once() -> None:
    worker = Counter()
    group = InProcessGroup(worker)
    group.close()
    group.close()
    assert worker.num_closed == 1
    with pytest.raises(RuntimeError, match="add was called on a closed group"):
        group.run(Counter.add, 1)
