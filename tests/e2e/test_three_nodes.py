"""Groups whose ranks are on different nodes of a cluster, each with an address of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import ALONE, environment_of_nodes, printed_by

from infra.waiting import wait_for

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

PROGRAM = Path(__file__).with_name("three_nodes.py")
DEADLINE_S = 900.0


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return environment_of_nodes()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Any]:
    return printed_by(PROGRAM, tmp_path_factory.mktemp("nodes"), environment, DEADLINE_S)


def test_ranks_on_two_nodes_train_like_one(found: dict[str, Any]) -> None:
    for name in ("first", "second"):
        assert found[name]["losses"] == pytest.approx(found[name]["alone"], abs=1e-5)
        assert all("collectives over eth7" in log for log in found[name]["logs"])


def test_two_groups_needing_every_node_run_one_after_the_other(
    found: dict[str, Any],
) -> None:
    said = sorted((found[name]["said"] for name in ("first", "second")), key=len)
    assert said[0] == []
    assert said[1][0].startswith("waits for room for 2 x 1 CPU (the cluster has ")


def test_a_node_that_dies_ends_the_group_by_name(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert "of 2 on node 10.77.0.3 failed in train" in killed["error"]
    assert killed["seconds"] < 60.0, "Ray itself would have noticed by then"


def test_nodes_leave_nothing_when_their_test_is_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    nodes = subprocess.Popen([*ALONE, sys.executable, str(PROGRAM), str(tmp_path)], env=environment)
    head = tmp_path / "head.log"
    wait_for(lambda: head.exists() and "runtime started" in head.read_text(), "a head", 90.0)
    started = [p for p in psutil.Process(nodes.pid).children(recursive=True)]
    assert any("gcs_server" in " ".join(p.cmdline()) for p in started)
    nodes.kill()
    nodes.wait(timeout=60.0)
    wait_for(lambda: not any(p.is_running() for p in started), "the nodes to be gone", 60.0)
