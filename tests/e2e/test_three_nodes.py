"""Groups whose ranks are on different nodes of a cluster, each with an address of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra import env
from infra.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exclusive]

NAMESPACES = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
ALONE = ("setpriv", "--pdeathsig", "KILL", *NAMESPACES)
PROGRAM = Path(__file__).with_name("three_nodes.py")
DEADLINE_S = 900.0


def why_not() -> str | None:
    """Why this machine has no namespaces for us."""
    probe = "mount -t tmpfs tmpfs /run && ip link add bridge0 type bridge && ip netns add n"
    try:
        subprocess.run([*ALONE, "sh", "-c", probe], check=True, capture_output=True, timeout=30.0)
    except FileNotFoundError as error:
        return f"needs setpriv, unshare (util-linux) and ip (iproute2): no {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"needs root that may make network namespaces: {error.stderr.decode().strip()}"
    return None


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return env.child_environment(PYTHONPATH=str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("nodes")
    command = [*ALONE, sys.executable, str(PROGRAM), str(root)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
    )
    logs = "".join(f"\n== {log.name}\n{log.read_text()}" for log in sorted(root.glob("*.log")))
    assert ended.returncode == 0, ended.stderr + logs
    return json.loads(ended.stdout.splitlines()[-1])


def test_ranks_on_two_nodes_train_like_one(found: dict[str, Any]) -> None:
    for name in ("first", "second"):
        assert found[name]["losses"] == pytest.approx(found[name]["alone"], abs=1e-5)
        assert all("collectives over eth7" in log for log in found[name]["logs"])


def test_of_two_groups_that_need_every_node_one_waits_and_both_finish(
    found: dict[str, Any],
) -> None:
    said = sorted((found[name]["said"] for name in ("first", "second")), key=len)
    assert said[0] == []
    assert said[1][0].startswith("waits for room for 2 x 1 CPU (the cluster has ")


def test_a_node_that_dies_ends_the_group_by_name(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert "of 2 on node 10.77.0.3 failed in train_mini_batch" in killed["error"]
    assert killed["seconds"] < 30.0


def test_nodes_leave_nothing_when_their_test_is_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    nodes = subprocess.Popen([*ALONE, sys.executable, str(PROGRAM), str(tmp_path)], env=environment)
    head = tmp_path / "head.log"
    wait_for(lambda: head.exists() and "runtime started" in head.read_text(), "a head", 90.0)
    started = [p for p in psutil.Process(nodes.pid).children(recursive=True)]
    assert any("gcs_server" in " ".join(p.cmdline()) for p in started)
    nodes.kill()
    nodes.wait(timeout=10.0)
    wait_for(lambda: not any(p.is_running() for p in started), "the nodes to be gone", 10.0)
