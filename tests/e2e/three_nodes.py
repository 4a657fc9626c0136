"""Three Ray nodes on this machine, each with an address of its own and all with its files.

    setpriv --pdeathsig KILL unshare --net --pid --mount --fork --kill-child --mount-proc \\
        python three_nodes.py DIRECTORY

Runs as the first process of namespaces that nobody else is in: whatever it starts ends with it,
and no interface or process of the machine is touched. Prints one line of JSON.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("three_nodes_driver.py")
NODES = {"head": "10.77.0.1", "two": "10.77.0.2", "three": "10.77.0.3"}
Environment = dict[str, str]
GCS = f"{NODES['head']}:6399"
START_DEADLINE_S = 90.0
DRIVER_DEADLINE_S = 240.0


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60.0).stdout


def make_network(nodes: Mapping[str, str]) -> None:
    """A namespace per node, joined by a bridge."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "link", "set", "bridge0", "up")
    for name, address in nodes.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth7")
        run("ip", "link", "set", f"to-{name}", "master", "bridge0", "up")
        run("ip", "link", "set", "eth7", "netns", name)
        inside = ("ip", "-n", name)
        run(*inside, "address", "add", f"{address}/24", "dev", "eth7")
        run(*inside, "link", "set", "eth7", "up")
        run(*inside, "link", "set", "lo", "up")


def start_node(
    root: Path,
    environment: Environment,
    name: str,
    address: str,
    *more: str,
    within: tuple[str, ...] = (),
) -> None:
    """A node of the cluster with one CPU, unless it is the head, which has none to give."""
    role, num_cpus = [f"--address={GCS}"], 1
    if name == "head":
        role, num_cpus = ["--head", "--port=6399", "--temp-dir=/run/ray", *more], 0
    started = on(
        name, environment, root / f"{name}.log",
        "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={address}",
        f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
        within=within,
    )  # fmt: skip
    if started.wait(timeout=START_DEADLINE_S):
        raise RuntimeError(f"node {name} did not start; its log says why")


def on(
    node: str,
    environment: Environment,
    log: Path,
    *arguments: str,
    within: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Python on a node, run by the command `within` if there is one."""
    command = ["ip", "netns", "exec", node, *within, sys.executable, *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def wait_until(is_so: Any, what: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"gave up after {deadline_s:g} s waiting for {what}")
        time.sleep(0.2)


def cluster_environment(root: Path) -> dict[str, str]:
    """Ray's settings for whoever uses the cluster, and for its nodes."""
    token = root / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    foreign = re.compile("RAY_|RLHF_")
    environment = {name: text for name, text in os.environ.items() if not foreign.match(name)}
    return environment | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": GCS,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/run",
    }


def cut_off(node: str) -> float:
    """End a node as if its machine lost its power: nobody hears that its connections end."""
    killed_at = time.monotonic()
    run("ip", "link", "set", f"to-{node}", "down")
    for pid in run("ip", "netns", "pids", node).split():
        os.kill(int(pid), signal.SIGKILL)
    return killed_at


def main() -> None:
    root = Path(sys.argv[1])
    environment = cluster_environment(root)
    make_network(NODES)
    for name, address in NODES.items():
        start_node(root, environment, name, address, "--include-dashboard=false")
    found: dict[str, Any] = {}
    # Both need both CPUs.
    names = ("first", "second")
    drivers = [drive(root, environment, name) for name in names]
    for driver in drivers:
        driver.wait(timeout=DRIVER_DEADLINE_S)
    for name in names:
        found[name] = json.loads((root / name / "result.json").read_text())
    found["killed"] = kill_a_node(root, environment)
    print(json.dumps(found))


def drive(root: Path, environment: Environment, name: str, *more: str) -> subprocess.Popen[bytes]:
    (root / name).mkdir()
    return on("head", environment, root / f"{name}.log", str(DRIVER), str(root / name), *more)


def kill_a_node(root: Path, environment: Environment) -> dict[str, Any]:
    driver = drive(root, environment, "third", "until it fails")
    busy = root / "third" / "busy"
    wait_until(busy.exists, "the third group to train", DRIVER_DEADLINE_S)
    killed_at = cut_off("three")
    driver.wait(timeout=DRIVER_DEADLINE_S)
    result = json.loads((root / "third" / "result.json").read_text())
    return {**result, "seconds": time.monotonic() - killed_at}


if __name__ == "__main__":
    main()
