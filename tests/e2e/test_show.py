"""A run to look at: its samples on a page, in MLflow, on the run page; its metrics in a mirror."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tiny_pipeline import Home

from infra.store.storage import open_storage
from infra.tracking.journal import read_journal
from infra.tracking.samples import read_samples

pytestmark = pytest.mark.slow


def data_of(page: Path) -> list[dict]:
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def show(home: Home, *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "flows.commands.cli", "show", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=home.environment, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return data_of(Path(ended.stdout.strip()))


def lineage_is_told(home: Home) -> None:
    """Every stage's run has what it read and made; the samples are traces of their round's."""
    client: Any = MlflowClient(f"sqlite:///{home.path / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'rlhf'")
    ids = [experiment.experiment_id]
    # A search leaves out what models a run reads.
    found = (client.get_run(run.info.run_id) for run in client.search_runs(ids))
    runs = {run.info.run_name: run for run in found}
    name_of = {model.model_id: model.name for model in client.search_logged_models(ids)}
    read, made = {}, {}
    for name, run in runs.items():
        data = {
            next(tag.value for tag in each.tags if tag.key == "mlflow.data.context"): each.dataset
            for each in run.inputs.dataset_inputs
        }
        read[name] = {name_of[each.model_id] for each in run.inputs.model_inputs} | {
            dataset.name for context, dataset in data.items() if context != "output"
        }
        made[name] = {name_of[each.model_id] for each in run.outputs.model_outputs} | {
            dataset.name for context, dataset in data.items() if context == "output"
        }
    assert made["preprocess"] == {"dataset"}
    assert (read["sft"], made["sft"]) == ({"dataset"}, {"sft"})
    assert {"dataset", "sft"} <= read["rl_round_1"]
    assert (read["merge"], made["merge"]) == ({"rl_round_1"}, {"merge"})
    assert read["evaluate"] == {"merge", "dataset"}
    assert made["promote"] == {"promotion"}
    round_id = runs["rl_round_1"].info.run_id
    traces = client.search_traces(locations=ids, max_results=500)
    assert len(traces) == 32
    assert {trace.info.trace_metadata["mlflow.sourceRun"] for trace in traces} == {round_id}
    (file,) = client.list_artifacts(runs["sft"].info.run_id, "output")
    assert file.path == "output/manifest.json"


def test_a_run_is_looked_at_everywhere(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    home = Home(tmp_path / "one")
    home.rlhf("run", "--set", "location.mirrors=[tensorboard]")
    (run,) = show(home)
    assert list(run["steps"]) == ["1", "2"]
    assert [len(samples) for samples in run["steps"].values()] == [16, 16]
    assert [step for step, _ in run["curves"]["reward"]] == [1, 2]
    for sample in run["steps"]["1"]:
        assert len(sample["mismatch"]) == len(sample["tokens"]) == sample["num_tokens"]

    (beside_report,) = home.path.glob("runs/*/samples.html")
    (in_mlflow,) = home.path.glob("mlflow-artifacts/*/artifacts/report/samples.html")
    assert data_of(beside_report) == data_of(in_mlflow) == [run]
    with closing(sqlite3.connect(home.path / "prefect" / "prefect.db")) as database:
        query = "SELECT data FROM artifact WHERE key = 'samples-tiny'"
        ((shown,),) = database.execute(query).fetchall()
        keys = {key for (key,) in database.execute("SELECT key FROM artifact")}
    assert {"progress-rl-round-1", "progress-evaluate"} <= keys
    assert "## Step 2" in shown

    lineage_is_told(home)

    mirrored = EventMultiplexer(size_guidance={"scalars": 0})
    mirrored.AddRunsFromDirectory(str(home.path / "tensorboard"))
    mirrored.Reload()
    names = {name.rpartition("/")[2].rpartition("-")[0]: name for name in mirrored.Runs()}
    assert {"sft", "rl_round_1", "evaluate", "promote"} <= set(names)
    storage = open_storage(str(home.path / "store"))
    for known in storage.runs.known():
        for fingerprint in known.used_at:
            spec = storage.channel(fingerprint).read_specification(0)
            if spec.stage not in {"sft", "rl_round"}:
                continue
            label = "sft" if spec.stage == "sft" else "rl_round_1"
            records, _ = read_journal(storage, fingerprint)
            points = {(name, r.step) for r in records if r.step for name in r.values}
            told = [
                (tag, scalar.step)
                for tag in mirrored.Runs()[names[label]]["scalars"]
                for scalar in mirrored.Scalars(names[label], tag)
                if scalar.step
            ]
            assert len(told) == len(set(told))
            assert set(told) == points
            assert bool(read_samples(storage, fingerprint)) == (label == "rl_round_1")
