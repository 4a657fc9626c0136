"""The whole pipeline by its command: real Prefect server, real Ray jobs, real MLflow.

A model of a few thousand parameters and a handful of steps: what is tested is the pipeline, not
what it learns.
"""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.s3_server import BUCKET, environment, s3_server
from tiny_pipeline import RUN_DEADLINE_S, Home, ran, settings

from infra.store.storage import open_storage
from infra.waiting import wait_for

LONG_SFT = settings("sft.num_steps=150", "promote.model_name=long")
SPLITS = ("sft", "rl", "evaluation")
ALL = [
    "preprocess",
    "sft",
    "evaluate_sft",
    "rl_round_1",
    "evaluate_rl_round_1",
    "merge",
    "evaluate",
    "promote",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, str]:
    home = Home(tmp_path_factory.mktemp("pipeline") / "first")
    return home, home.rlhf("run")


@pytest.mark.slow
def test_the_first_run_runs_everything_and_reports(finished: tuple[Home, str]) -> None:
    home, printed = finished
    report = home.report(printed)
    assert ran(report) == ALL
    assert list(report["accuracy"]) == ["sft", "rl_round_1", "final"]
    assert report["accuracy"]["final"] == report["accuracy"]["rl_round_1"]
    assert report["promoted"] is True
    assert "sft  step 4/4" in printed
    assert not home.has_ray, "the run ends the cluster that it started"
    directory = home.path / "runs" / report["run"]
    assert {"accuracy.svg", "reward.png", "time.svg", "report.md"} <= {
        each.name for each in directory.iterdir()
    }


@pytest.mark.slow
def test_prefect_shows_the_run_and_its_stages(finished: tuple[Home, str]) -> None:
    home, _ = finished
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        first = database.execute("select id from flow_run order by created limit 1").fetchone()[0]
        tasks = database.execute(
            "select name, state_type from task_run where flow_run_id = ?", (first,)
        ).fetchall()
        artifacts = {row[0] for row in database.execute("select key from artifact")}
    assert sorted(tasks) == sorted((name, "COMPLETED") for name in ALL)
    assert {"report-tiny", "stages-tiny", "progress-sft"} <= artifacts


@pytest.mark.slow
def test_mlflow_holds_parent_children_and_the_model(finished: tuple[Home, str]) -> None:
    from mlflow import set_tracking_uri
    from mlflow.tracking import MlflowClient
    from mlflow.transformers import load_model

    home, printed = finished
    uri = f"sqlite:///{home.path / 'mlflow.db'}"
    set_tracking_uri(uri)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    parent = min(parents, key=lambda run: run.info.start_time)
    children = {
        run.info.run_name: run
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert sorted(children) == sorted(ALL)
    digests = {stage["name"]: stage["digest"] for stage in home.report(printed)["stages"]}
    for name, run in children.items():
        assert run.info.status == "FINISHED"
        assert run.data.params
        assert run.data.tags["rlhf.output.digest"] == digests[name]
    assert children["sft"].data.tags["rlhf.input.dataset"] == digests["preprocess"]
    history = client.get_metric_history(children["sft"].info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    version = client.get_model_version_by_alias("tiny", "champion")
    assert version.tags["rlhf.digest"] == digests["merge"]
    loaded: Any = load_model("models:/tiny@champion", return_type="components")
    assert sum(weight.numel() for weight in loaded["model"].parameters()) > 0
    assert loaded["tokenizer"]("1+1=")["input_ids"]


@pytest.mark.slow
def test_the_second_run_reuses_everything_and_starts_no_cluster(
    finished: tuple[Home, str],
) -> None:
    home, first = finished
    log = home.path / "logs" / "ray.log"
    before = log.stat().st_mtime_ns
    report = home.report(first)
    printed = home.rlhf("run")
    assert printed.count("reused") >= len(report["stages"])
    assert home.report(printed) == report, "the report of the work stays"
    assert log.stat().st_mtime_ns == before


@pytest.mark.stacks
def test_bucket_run_matches_and_another_machine_reuses_it(
    finished: tuple[Home, str], tmp_path: Path
) -> None:
    whole, printed = finished
    expected = {stage["name"]: stage["digest"] for stage in whole.report(printed)["stages"]}
    uri = f"s3://{BUCKET}/tiny"
    with s3_server() as address:
        homes = [Home(tmp_path / name) for name in ("first", "second")]
        for home in homes:
            home.environment |= environment(address)
        first, second = (home.run(f"location.store={uri}") for home in homes)
        assert ran(first) == ALL
        assert {stage["name"]: stage["digest"] for stage in first["stages"]} == expected
        assert ran(second) == []
        assert not list(tmp_path.glob("*/home/store")), "a home has none of its own"
        shown = subprocess.run(
            [sys.executable, "-m", "flows.commands.cli", "show", "--store", uri],
            capture_output=True, text=True, env=homes[1].environment, timeout=RUN_DEADLINE_S,
        )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    page = Path(shown.stdout.strip()).read_text()
    assert '"curves": {"reward": [[1, ' in page
    assert '"steps": {"1": [{"name": ' in page


@pytest.mark.slow
def test_run_from_a_stage_reruns_it_and_only_changed_successors(
    finished: tuple[Home, str],
) -> None:
    home, printed = finished
    before = {stage["name"]: stage for stage in home.report(printed)["stages"]}
    start = ["--from", "rl_round_1"]
    planned = json.loads(home.rlhf("plan", "--json", *start))["stages"]
    status = {stage["label"]: (stage["status"], stage["why"]) for stage in planned}
    digest = before["rl_round_1"]["digest"][:12]
    assert status["evaluate_sft"] == ("hit", "")
    assert status["rl_round_1"] == ("miss", f"forced; it yielded {digest} before")
    assert status["promote"] == ("likely_reuse", f"reused if rl_round_1 yields {digest} again")
    report = home.report(home.rlhf("run", *start))
    assert ran(report) == ["rl_round_1"]
    assert {stage["name"]: stage["digest"] for stage in report["stages"]} == {
        name: stage["digest"] for name, stage in before.items()
    }
    attempts = open_storage(str(home.path / "store")).attempts
    log = attempts.entries(before["rl_round_1"]["fingerprint"])
    assert [entry.kind for entry in log] == ["held", "committed"] * 2


@pytest.mark.slow
def test_an_added_round_runs_itself_and_what_follows(finished: tuple[Home, str]) -> None:
    home, _ = finished
    planned = json.loads(home.rlhf("plan", "--json", *settings("rl.num_rounds=2")))
    status = {stage["label"]: stage["status"] for stage in planned["stages"]}
    assert (status["rl_round_1"], status["rl_round_2"]) == ("hit", "miss")
    report = home.report(home.rlhf("run", *settings("rl.num_rounds=2")))
    assert ran(report) == ["rl_round_2", "evaluate_rl_round_2", "merge", "evaluate", "promote"]


@pytest.mark.stacks
def test_a_killed_run_is_continued_and_ends_bitwise_the_same(
    finished: tuple[Home, str], tmp_path: Path
) -> None:
    whole, _ = finished
    expected = whole.report(whole.rlhf("run", *LONG_SFT))
    home = Home(tmp_path / "killed")
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            home.command("run", *LONG_SFT), stdout=out, stderr=out, env=home.environment
        )

    def trains() -> bool:
        assert process.poll() is None, (tmp_path / "out").read_text()
        return "sft  step 3/" in (tmp_path / "out").read_text()

    wait_for(trains, "the third step of SFT", RUN_DEADLINE_S)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    printed = home.rlhf("run", *LONG_SFT)
    assert "attached to sft-" in printed or "sft  reused" in printed
    report = home.report(printed)
    assert [(stage["name"], stage["digest"]) for stage in report["stages"]] == [
        (stage["name"], stage["digest"]) for stage in expected["stages"]
    ]


@pytest.mark.slow
def test_a_refusal_of_a_job_is_one_line_and_exit_two(
    finished: tuple[Home, str], tmp_path: Path
) -> None:
    home, _ = finished
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": "a\n')
    splits = (f"data.{split}=[{{path: {data}, format: messages}}]" for split in SPLITS)
    ended = home.start("run", *settings("data.arithmetic=null", *splits))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "train.jsonl:1: not JSON" in ended.stderr
