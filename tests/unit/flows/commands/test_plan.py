"""What a plan reads: the log of each stage and manifests, never the bytes of an artifact."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.config.stages.data import PreprocessStageConfig
from flows.machine_survey import resolve_hardware
from flows.recipe.recipe import load_recipe
from infra import env
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage
from tasks.runner.run import stage_request

MAX_READ_BYTES = 100_000_000
ARTIFACT_BYTES = 20_000_000_000
MEASURED = """
import sys
from pathlib import Path
from flows.commands.cli import main
code = main()
counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
print(counters["rchar"], file=sys.stderr)
sys.exit(code)
"""
"""The counter has what ended children read, too."""


def commit_sparse_dataset(home: Path) -> None:
    """Finish the quickstart's first stage with a huge file that takes no room."""
    recipe = load_recipe("quickstart", ["rl.num_rounds=1"])
    assert resolve_hardware(recipe.hardware, home).platform  # the machine is known from now on
    request = stage_request(PreprocessStageConfig.from_recipe(recipe), recipe.seed)
    store = LocalStorage(home / "store")
    made = home / "made"
    made.mkdir()
    with (made / "rows.parquet").open("wb") as file:
        file.truncate(ARTIFACT_BYTES)
    artifact = store.publish(made, "dataset", {"rows.parquet": "0" * 64})
    holder = Holder(id="test", process="test")
    store.commit(
        store.attempts.hold(request.fingerprint, holder, 0),
        CommitRecord(
            fingerprint=request.fingerprint,
            stage=request.config.stage,
            artifact=artifact,
            attempt=0,
            committed_at="2026-01-01T00:00:00+00:00",
        ),
    )


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's counters of bytes")
def test_a_plan_reads_no_bytes_of_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    home = tmp_path / "home"
    commit_sparse_dataset(home)
    arguments = ["plan", "quickstart", "--set", "rl.num_rounds=1", "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        capture_output=True,
        text=True,
        env=env.child_environment(RLHF_HOME=str(home)),
        timeout=120,
        check=True,
    )
    stages = {stage["label"]: stage["status"] for stage in json.loads(ended.stdout)["stages"]}
    assert (stages["preprocess"], stages["sft"]) == ("hit", "miss")
    assert int(ended.stderr.split()[-1]) < MAX_READ_BYTES
