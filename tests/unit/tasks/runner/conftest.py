"""A store, and a stage, of each test's own."""

from pathlib import Path

import pytest
from followed_stage import Stage

from infra.store.storage import LocalStorage
from tasks.runner import following


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(following, "STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "COMMIT_GRACE_S", 0.3)
    return Stage(tmp_path)
