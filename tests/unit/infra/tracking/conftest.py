"""A world of each test's own."""

from pathlib import Path

import pytest
from tracked_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
