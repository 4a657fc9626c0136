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
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("three_nodes_driver.py")
NODES = {"head": "10.77.0.1", "two": "10.77.0.2", "three": "10.77.0.3"}
GCS = f"{NODES['head']}:6399"
START_DEADLINE_S = 90.0
DRIVER_DEADLINE_S = 240.0


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60.0).stdout


def make_network() -> None:
    """A namespace per node, joined by a bridge."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "link", "set", "bridge0", "up")
    for name, address in NODES.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth7")
        run("ip", "link", "set", f"to-{name}", "master", "bridge0", "up")
        run("ip", "link", "set", "eth7", "netns", name)
        inside = ("ip", "-n", name)
        run(*inside, "address", "add", f"{address}/24", "dev", "eth7")
        run(*inside, "link", "set", "eth7", "up")
        run(*inside, "link", "set", "lo", "up")


def start_nodes(root: Path, environment: dict[str, str]) -> None:
    """A head that has no CPU to give, and two nodes with one each."""
    for name, address in NODES.items():
        role = [f"--address={GCS}"]
        num_cpus = 1
        if name == "head":
            role = ["--head", "--port=6399", "--include-dashboard=false"]
            role += ["--temp-dir=/run/ray"]
            num_cpus = 0
        on(
            name, environment, root / f"{name}.log",
            "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={address}",
            f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
        ).wait(timeout=START_DEADLINE_S)  # fmt: skip


def on(
    node: str, environment: dict[str, str], log: Path, *arguments: str
) -> subprocess.Popen[bytes]:
    """Python on a node."""
    command = ["ip", "netns", "exec", node, sys.executable, *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def wait_until(is_so: Any, what: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"gave up after {deadline_s:g} s waiting for {what}")
        time.sleep(0.2)


def main() -> None:
    root = Path(sys.argv[1])
    token = root / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    foreign = re.compile("RAY_|RLHF_")
    environment = {name: text for name, text in os.environ.items() if not foreign.match(name)}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": GCS,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/run",
    }
    make_network()
    start_nodes(root, environment)
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


def drive(
    root: Path, environment: dict[str, str], name: str, *more: str
) -> subprocess.Popen[bytes]:
    (root / name).mkdir()
    return on("head", environment, root / f"{name}.log", str(DRIVER), str(root / name), *more)


def kill_a_node(root: Path, environment: dict[str, str]) -> dict[str, Any]:
    driver = drive(root, environment, "third", "until it fails")
    busy = root / "third" / "busy"
    wait_until(busy.exists, "the third group to train", DRIVER_DEADLINE_S)
    killed_at = time.monotonic()
    # As of a machine that lost its power: nobody hears that its connections end.
    run("ip", "link", "set", "to-three", "down")
    for pid in run("ip", "netns", "pids", "three").split():
        os.kill(int(pid), signal.SIGKILL)
    driver.wait(timeout=DRIVER_DEADLINE_S)
    result = json.loads((root / "third" / "result.json").read_text())
    return {**result, "seconds": time.monotonic() - killed_at}


if __name__ == "__main__":
    main()
