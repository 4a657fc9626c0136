"""A pipeline on a bucket, each of whose processes is on a node with a disk of its own.

    setpriv --pdeathsig KILL unshare --net --pid --mount --fork --kill-child --mount-proc \\
        python bucket_on_nodes.py DIRECTORY RECIPE

`rlhf run`, the drivers of the jobs, two ranks and a replica have a node each; the service listens
beside them. What a node can write is in memory of its own: the rest of the machine's files, the
interpreter and the sources among them, is there to be read. Prints one line of JSON.
"""

import json
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline_on_nodes import ON_THREE_NODES, RUN_DEADLINE_S
from rlhf.testing.s3_server import BUCKET, environment, s3_server
from three_nodes import cluster_environment, make_network, on, run, start_node
from tiny_pipeline import Home, settings

NODES = {name: f"10.77.0.{number}" for number, name in enumerate(("head", "b", "c", "d"), 1)}
FLOW, FLOW_ADDRESS, SERVICE_ADDRESS = "flow", "10.77.0.9", "10.77.0.99"
OWN = ("/tmp", "/run", "/dev/shm")  # noqa: S108  what a test may write
DISKS_OF_ITS_OWN = "; ".join(
    ["set -e", "mount -o remount,bind,ro /", *(f"mount -t tmpfs tmpfs {each}" for each in OWN)]
)
ALONE = ("sh", "-c", f'{DISKS_OF_ITS_OWN}; exec "$@"', "alone")
RUN_DIR = Path("/tmp/pipeline")  # noqa: S108  of each node alone
KERNEL_FILES = {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "nsfs"}


def what_it_has(root: Path, mounts: str) -> dict[str, Any]:
    """What a node wrote and could write.

    Args:
        root: its files, as this process sees them.
        mounts: its `/proc/PID/mountinfo`.
    """
    shared = []
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        place, options = before.split()[4:6]
        is_kernels = behind.split()[0] in KERNEL_FILES or Path(place).is_relative_to("/sys")
        is_own = any(Path(place).is_relative_to(each) for each in OWN)
        if "ro" not in options.split(",") and not is_kernels and not is_own:
            shared.append(place)
    home = root / str(RUN_DIR).lstrip("/") / "home"
    return {
        "disks": [(root / each.lstrip("/")).stat().st_dev for each in OWN],
        "shared": shared,
        "home": sorted(path.name for path in home.iterdir()) if home.exists() else [],
    }


def play(recipe: str, *words: str) -> None:
    """On the flow's node: run the recipe twice, and print what came out."""
    home = Home(RUN_DIR, None if recipe == "tiny" else recipe, RUN_DEADLINE_S)
    kept = ("RAY_", "AWS_")
    home.environment |= {n: text for n, text in os.environ.items() if n.startswith(kept)}
    report = home.run(*words)
    again = home.rlhf("run", *settings(*words)).splitlines()
    mounts = Path("/proc/self/mountinfo").read_text()
    found = {
        "accuracy": report["accuracy"],
        "ran": [stage["name"] for stage in report["stages"] if not stage["reused"]],
        "reused": [line.split()[0] for line in again if "  reused" in line],
        "submitted": [line for line in again if "  submitted" in line],
    }
    print(json.dumps(found | {"node": what_it_has(Path("/"), mounts)}))


def node_of_cluster(name: str) -> dict[str, Any]:
    """Of a node whose Ray is up."""
    for pid in run("ip", "netns", "pids", name).split():
        process = Path("/proc", pid)
        with suppress(FileNotFoundError):
            if b"raylet/raylet" in (process / "cmdline").read_bytes():
                return what_it_has(process / "root", (process / "mountinfo").read_text())
    raise LookupError(name)


def main(root: Path, recipe: str) -> None:
    surroundings = cluster_environment(root)
    del surroundings["RAY_AUTH_TOKEN_PATH"]
    surroundings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    make_network({**NODES, FLOW: FLOW_ADDRESS})
    run("ip", "address", "add", f"{SERVICE_ADDRESS}/24", "dev", "bridge0")
    with s3_server(SERVICE_ADDRESS) as address:
        surroundings |= environment(address)
        for name, own in NODES.items():
            dashboard = ("--include-dashboard=true", f"--dashboard-host={own}")
            more = dashboard if name == "head" else ()
            start_node(root, surroundings, name, own, *more, within=ALONE)
        words = [*ON_THREE_NODES, f"location.store=s3://{BUCKET}/{recipe}"]
        surroundings["RAY_ADDRESS"] = f"http://{NODES['head']}:8265"
        log = root / "flow.log"
        flow = on(FLOW, surroundings, log, __file__, "play", recipe, *words, within=ALONE)
        if flow.wait(timeout=RUN_DEADLINE_S):
            raise RuntimeError("the run failed; its log says why")
        found = json.loads(log.read_text().splitlines()[-1])
        nodes = {name: node_of_cluster(name) for name in NODES}
    print(json.dumps(found | {"nodes": nodes | {FLOW: found.pop("node")}}))


if __name__ == "__main__":
    if sys.argv[1] == "play":
        play(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]), sys.argv[2])
