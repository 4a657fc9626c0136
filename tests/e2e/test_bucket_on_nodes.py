"""A pipeline on a bucket whose processes have nothing else in common."""

from pathlib import Path

import pytest
from namespaces import PIPELINES_DEADLINE_S, environment_of_nodes, printed_by

PROGRAM = Path(__file__).with_name("bucket_on_nodes.py")


@pytest.mark.stacks
@pytest.mark.exclusive
@pytest.mark.parametrize("recipe", ["tiny", "quickstart"])
def test_flow_driver_ranks_and_replica_share_only_a_bucket(tmp_path: Path, recipe: str) -> None:
    environment = environment_of_nodes()
    found = printed_by(PROGRAM, tmp_path, environment, PIPELINES_DEADLINE_S, recipe)
    assert found["ran"] == found["reused"] != []
    assert not found["submitted"]
    assert found["accuracy"]["final"] is not None
    nodes = found["nodes"]
    assert [node["shared"] for node in nodes.values()] == [[]] * 5, "else it may write elsewhere"
    disks = [disk for node in nodes.values() for disk in node["disks"]]
    assert len(disks) == len({*disks}) == 15
    homes = {name: {*node["home"]} for name, node in nodes.items()}
    of_flow, of_jobs = {"runs", "prefect", "tracking", "mlflow.db"}, {"remote", "brought"}
    assert of_flow <= homes["flow"]
    assert not homes["flow"] & of_jobs, "what jobs write is where they are"
    for name in ("head", "b", "c", "d"):
        assert not homes[name] & {*of_flow, "store"}
        assert homes[name] & of_jobs
    assert all("brought" in homes[name] for name in "bcd")
