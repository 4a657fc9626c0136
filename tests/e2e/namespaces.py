"""Programs that make network namespaces of their own, as tests run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import env

NAMESPACES = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
ALONE = ("setpriv", "--pdeathsig", "KILL", *NAMESPACES)
PIPELINES = Path(__file__).with_name("pipeline_on_nodes.py")
PIPELINES_DEADLINE_S = 3000.0


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


def environment_of_nodes() -> dict[str, str]:
    """Of such a program; skips the test where this machine cannot run it."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return env.child_environment(PYTHONPATH=str(Path(__file__).parents[2]))


def printed_by(
    program: Path, root: Path, environment: dict[str, str], deadline_s: float, *words: str
) -> dict[str, Any]:
    """What a program in namespaces of its own prints."""
    command = [*ALONE, sys.executable, str(program), str(root), *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline_s, env=environment
    )
    logs = "".join(f"\n== {log.name}\n{log.read_text()}" for log in sorted(root.glob("*.log")))
    assert ended.returncode == 0, ended.stderr + logs
    return json.loads(ended.stdout.splitlines()[-1])
