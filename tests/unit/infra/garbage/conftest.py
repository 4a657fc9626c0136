"""Fixtures of the tests of garbage in a bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf.testing.s3_server import environment, s3_server

from infra.store.s3 import inventory, mirror
from tests.unit.infra.garbage.bucket import Store


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(inventory, "POLL_S", 0.05)
    yield Store(tmp_path, monkeypatch)
    mirror.end_below(tmp_path)
