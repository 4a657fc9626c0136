"""Two runs on one cluster at once, each of which needs all places that the cluster has."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

EVERY_PLACE = (
    "training.num_workers=2",
    "rollout.placement=disaggregated",
    "rollout.num_replicas=2",
    "rl.num_steps_per_round=4",
)
"""Two ranks and two replicas are the four CPUs that a cluster of one small machine admits."""


def test_one_queues_and_both_finish(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    runs = [
        subprocess.Popen(
            home.command("run", *settings(*EVERY_PLACE, f"seed={seed}")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=home.environment,
        )
        for seed in (1, 2)
    ]
    printed = [run.communicate(timeout=2 * home.deadline_s)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(printed)
    digests = {
        stage["digest"]
        for each in printed
        for stage in home.report(each)["stages"]
        if stage["name"] == "rl_round_1" and not stage["reused"]
    }
    assert len(digests) == 2
    said = [
        record["message"]
        for path in (home.path / "store" / "work").rglob("*.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        if record["kind"] == "log" and record["message"].startswith("waits for room")
    ]
    assert any(
        "waits for room for 4 x 1 CPU (the cluster has 1 x (4 CPU))" in each for each in said
    )
