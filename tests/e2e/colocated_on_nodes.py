"""A rank and a replica on each of two Ray nodes, none of which shares memory with another.

    setpriv --pdeathsig KILL unshare --net --pid --mount --fork --kill-child --mount-proc \\
        python colocated_on_nodes.py DIRECTORY

As `three_nodes.py`; the driver is on the head. Prints one line of JSON.
"""

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from three_nodes import (
    DRIVER_DEADLINE_S,
    NODES,
    cluster_environment,
    make_network,
    on,
    start_node,
)
from three_nodes_driver import BATCH, tiny_policy

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.controller import launch
from engines.controller.launch import connect_ray, launch_policy_beside
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.rollout import ServedRollout
from engines.types import RolloutRequest, SamplingParams

OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
REQUESTS = [
    RolloutRequest(f"p{i}", tuple(range(4, 7 + i)), SamplingParams(12), (i, i + 50))
    for i in range(4)
]


def main() -> None:
    root = Path(sys.argv[1])
    environment = cluster_environment(root)
    make_network(NODES)
    for name, address in NODES.items():
        within = () if name == "head" else OWN_MEMORY
        start_node(root, environment, name, address, "--include-dashboard=false", within=within)
    log = root / "driver.log"
    driver = on("head", environment, log, __file__, str(root), "driver", within=OWN_MEMORY)
    if driver.wait(timeout=DRIVER_DEADLINE_S):
        raise RuntimeError("the driver failed; its log says why")
    print((root / "result.json").read_text())


def drive(root: Path) -> None:
    torch.set_num_threads(1)
    rollout = RolloutConfig(placement="colocated", timeout_s=60.0)
    spec = replace(tiny_policy(root), rollout=rollout)
    connect_ray()
    found = {"inside": two_versions(spec, root / "inside")}
    # Our own engine as one that needs processes of its own, which starts in seconds.
    launch.is_embedded = lambda rollout: False
    found["beside"] = two_versions(spec, root / "beside")
    (root / "result.json").write_text(json.dumps(found))


def two_versions(spec: WorkerSpec, log_dir: Path) -> dict[str, Any]:
    """Tokens and digests of two versions of the weights, and the way that these take."""
    found: dict[str, Any] = {"tokens": [], "digests": []}
    with ExitStack() as stack:
        workers, rollout, _ = launch_policy_beside(spec, {}, log_dir)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(rollout))
        if isinstance(rollout, ServedRollout):
            transport: Any = rollout._launched.new_transport([1, 1])
            found["senders"] = getattr(transport, "senders", type(transport).__name__)
            transport.stop()
        for version in range(2):
            found["digests"].append(rollout.publish(version).sent.digest)
            rows = rollout.generate(REQUESTS)
            found["tokens"].append([[each.token_ids.tolist() for each in row] for row in rows])
            rollout.sleep()
            workers.run(ModelWorker.train, BATCH, SupervisedLoss())
    return found


if __name__ == "__main__":
    if sys.argv[2:]:
        drive(Path(sys.argv[1]))
    else:
        main()
