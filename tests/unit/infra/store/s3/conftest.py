"""One S3 service for the tests of this directory, and a proxy before it that can fail."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.fault_proxy import FaultProxy, fault_proxy
from rlhf.testing.s3_server import BUCKET, environment, s3_server

from infra.store.s3 import mirror
from infra.store.s3.mirror import Mirror


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What every store of the test talks to."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    made: list[Mirror] = []

    def noted(*arguments: Any) -> Mirror:
        made.append(Mirror(*arguments))
        return made[-1]

    monkeypatch.setattr(mirror, "Mirror", noted)
    monkeypatch.setattr(mirror, "_mirrors", {})
    with fault_proxy(endpoint) as running:
        for name, value in environment(running.address).items():
            monkeypatch.setenv(name, value)
        yield running
        for each in made:
            each.end()


@pytest.fixture
def uri(proxy: FaultProxy) -> str:
    """Of a store that nobody used."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
