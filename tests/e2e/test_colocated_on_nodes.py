"""Replicas beside ranks on two nodes, which share no memory with each other or with the driver."""

from pathlib import Path

import pytest
from namespaces import environment_of_nodes, printed_by

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

PROGRAM = Path(__file__).with_name("colocated_on_nodes.py")
DEADLINE_S = 600.0


def test_replicas_get_weights_from_the_rank_on_their_node(tmp_path: Path) -> None:
    found = printed_by(PROGRAM, tmp_path, environment_of_nodes(), DEADLINE_S)
    assert found["beside"]["senders"] == [0, 1]
    first, second = found["beside"]["digests"]
    assert first != second
    assert found["beside"]["digests"] == found["inside"]["digests"]
    assert found["beside"]["tokens"] == found["inside"]["tokens"]
