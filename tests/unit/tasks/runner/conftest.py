"""A store, and a stage, of each test's own."""

from functools import partial
from pathlib import Path

import pytest
from followed_stage import Clock, Stage

from infra import waiting
from infra.store.heartbeat import BeatWatch
from infra.store.storage import LocalStorage
from tasks.runner import following


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What followers live by: their waits take no time, and nothing is late."""
    clock = Clock()
    for module in (following, waiting):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(following, "BeatWatch", partial(BeatWatch, clock=clock.monotonic))
    return clock


@pytest.fixture
def stage(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(following, "STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "COMMIT_GRACE_S", 0.3)
    return Stage(tmp_path, clock)
