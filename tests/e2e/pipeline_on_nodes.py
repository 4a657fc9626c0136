"""Pipelines on a cluster whose head has no CPU and whose three nodes have one each.

    setpriv --pdeathsig KILL unshare --net --pid --mount --fork --kill-child --mount-proc \\
        python pipeline_on_nodes.py DIRECTORY SCENARIO... [--set PATH=VALUE ...]

Two training ranks and a replica take a node each. Scenarios, in turn: `whole` is left alone,
`replica` loses the replica's node, and another joins, `rank` loses a rank's node, fails, and is
run again when another has joined, `quickstart` is that recipe, left alone. As `three_nodes.py`.
Prints one line of JSON.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from three_nodes import (
    Environment,
    cluster_environment,
    cut_off,
    make_network,
    run,
    start_node,
    wait_until,
)
from tiny_pipeline import Home, settings

from hardware.cpu import CPUPlatform

NODES = {name: f"10.77.0.{n}" for n, name in enumerate(("head", "b", "c", "d", "e", "f"), 1)}
SPARE = ["e", "f"]
QUICKSTART = "quickstart"
API = f"http://{NODES['head']}:8265"
RUN_DEADLINE_S = 1800.0
ON_THREE_NODES = (
    "hardware.platform=cpu",
    f"hardware.device_kind={CPUPlatform().device_label()}",
    "training.num_workers=2",
    "rollout.placement=disaggregated",
    "rollout.silence_s=20",
)
OF_THE_TINY_ONE = (
    "rl.num_steps_per_round=16",
    # No answer is right, so nothing else would move the weights.
    "rl.algorithm.entropy_coeff=-0.05",
    "checkpoint.every_num_steps=1",
)


class Pipeline:
    """`rlhf run` on the head, in a home of its own."""

    def __init__(
        self, root: Path, environment: Environment, words: list[str], recipe: str | None = None
    ) -> None:
        self.home = Home(root, recipe)
        self.home.environment |= environment | {"RAY_ADDRESS": API}
        own = () if recipe else OF_THE_TINY_ONE
        self.words = [*settings(*ON_THREE_NODES, *own), *words]
        self.log = root / "run.log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        command = ["ip", "netns", "exec", "head", *self.home.command("run", *self.words)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=self.home.environment, stdout=output, stderr=output
            )

    def end(self) -> dict[str, Any]:
        code = self.process.wait(timeout=RUN_DEADLINE_S)
        printed = self.log.read_text()
        found: dict[str, Any] = {"code": code, "printed": printed}
        if code == 0:
            report = self.home.report(printed)
            found["digests"] = {s["name"]: s["digest"] for s in report["stages"]}
            found["accuracy"] = report["accuracy"]
        found["log"] = "".join(
            path.read_text()
            for kind in ("*.log", "*.txt")
            for path in sorted((self.home.path / "store" / "work").rglob(kind))
        )
        found["values"] = self.values()
        return found

    def values(self) -> list[dict[str, Any]]:
        """What the journals have of RL steps."""
        return [
            {"step": record["step"], **record["values"]}
            for file in sorted((self.home.path / "store" / "work").rglob("*.jsonl"))
            for record in map(json.loads, whole_lines(file))
            if "actor/pg_loss" in record.get("values", {})
        ]

    def await_steps(self, num: int) -> None:
        def is_so() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return len(self.values()) >= num

        wait_until(is_so, f"{num} RL steps", RUN_DEADLINE_S)


def whole_lines(file: Path) -> list[str]:
    return file.read_text().rpartition("\n")[0].splitlines()


def node_of(process: str) -> str:
    """A node on which a process of this class runs."""
    for node in NODES:
        for pid in run("ip", "netns", "pids", node).split():
            try:
                command = Path("/proc", pid, "cmdline").read_bytes()
            except FileNotFoundError:
                continue
            if f"ray::{process}".encode() in command:
                return node
    raise LookupError(process)


def main() -> None:
    root, *words = map(str, sys.argv[1:])
    options = words[words.index("--set") :] if "--set" in words else []
    scenarios = words[: len(words) - len(options)]
    environment = cluster_environment(Path(root))
    make_network(NODES)
    dashboard = ("--include-dashboard=true", f"--dashboard-host={NODES['head']}")
    start_node(Path(root), environment, "head", NODES["head"], *dashboard)
    for name in sorted(NODES.keys() - {"head", *SPARE}):
        start_node(Path(root), environment, name, NODES[name])
    found = {}
    for scenario in scenarios:
        recipe = scenario if scenario == QUICKSTART else None
        pipeline = Pipeline(Path(root) / scenario, environment, options, recipe)
        start = time.monotonic()
        pipeline.start()
        found[scenario] = play(scenario, pipeline, Path(root), environment)
        found[scenario]["seconds"] = time.monotonic() - start
    print(json.dumps(found))


def play(scenario: str, pipeline: Pipeline, root: Path, environment: Environment) -> dict[str, Any]:
    if scenario in {"whole", QUICKSTART}:
        return pipeline.end()
    pipeline.await_steps(3)
    lost = node_of("ReplicaProcess" if scenario == "replica" else "RankProcess")
    killed_at = cut_off(lost)
    failed = {}
    if scenario == "rank":
        failed = pipeline.end()
        failed["seconds"] = time.monotonic() - killed_at
    joining = SPARE.pop()
    start_node(root, environment, joining, NODES[joining])
    if failed:
        pipeline.start()
    return {**pipeline.end(), "failed": failed, "lost": NODES[lost], "joined": NODES[joining]}


if __name__ == "__main__":
    main()
