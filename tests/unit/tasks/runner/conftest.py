"""A store of each test's own."""

from pathlib import Path

import pytest

from infra.store.storage import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")
