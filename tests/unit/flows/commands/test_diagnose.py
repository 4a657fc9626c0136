"""The command `rlhf diagnose`, and what it reads of a store."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.config.recipe import LocationConfig
from engines.config.stages.rl import RLRoundStageConfig
from flows.commands.cli import main
from flows.recipe.recipe import load_recipe
from flows.report.report import build_report, make_run_directory, write_report
from infra.store.heartbeat import Beat, FixedFile
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import LocalStorage, open_storage
from infra.store.work_channel import JobProblem
from infra.tracking.journal import Journal, StageHistory
from tasks.runner.run import StageResult

ONE, TWO = "1a" * 32, "2b" * 32
RECIPE = load_recipe("quickstart", ["diagnosis.window_num_steps=2"])


def stage(home: Path, fingerprint: str, number: int, entropy: Sequence[float]) -> LocalStorage:
    storage = LocalStorage(home / "store")
    storage.attempts.hold(fingerprint, Holder(id="a", process="test"), 0)
    channel = storage.channel(fingerprint)
    channel.write_specification(
        StageSpec(
            stage="rl_round",
            job_module="engines.jobs.rl_round",
            fingerprint=fingerprint,
            attempt=0,
            config=RLRoundStageConfig.from_recipe(RECIPE, number).model_dump(mode="json"),
            inputs={},
            seed=0,
            store_uri=storage.uri,
        )
    )
    with Journal(channel.local_dir(0) / "journal.jsonl") as journal:
        for step, value in enumerate(entropy, start=1 + 10 * (number - 1)):
            journal.metrics(step, {"actor/entropy": value})
    storage.runs.begin("a" * 64, RECIPE.run_name)
    storage.runs.use("a" * 64, fingerprint)
    return storage


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    return tmp_path


def test_a_sick_run_by_its_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage(home, ONE, 1, [0.5] * 4)
    make_run_directory(RECIPE.model_copy(update={"location": LocationConfig(home=str(home))}))
    assert main(["diagnose", RECIPE.run_name]) == 0
    assert "no findings" in capsys.readouterr().out
    stage(home, TWO, 2, [0.01] * 4)
    assert main(["diagnose"]) == 1, "the latest run"
    said = capsys.readouterr().out
    assert "!  rl_round_2: entropy_collapse: the policy's entropy fell to 2%" in said
    page = Path(said.splitlines()[-1])
    assert page == home / "runs" / RECIPE.run_name / "diagnosis.html"
    assert "entropy_collapse" in page.read_text()
    assert main(["diagnose", TWO[:8]]) == 0, "one round alone shows no fall"


def test_for_machines(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage(home, ONE, 1, [0.5])
    problem = JobProblem(type="X", message="full", exit_code=1, cause="disk_full")
    LocalStorage(home / "store").channel(ONE).write_error(0, problem)
    assert main(["diagnose", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["symptom"], finding["area"], finding["stage"]) == (
        "disk_full",
        "resources",
        "rl_round_1",
    )


def test_a_job_whose_process_is_gone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = stage(home, ONE, 1, [0.5]).channel(ONE).local_dir(0)
    machine, _, _ = own_stamp().split(".")
    for stamp, code in ((f"{machine}.999999.1", 1), (own_stamp(), 0)):
        beat = Beat(process=stamp, number=1, phase="train", step=1)
        file = FixedFile(directory / "heartbeat")
        file.write(beat.model_dump_json().encode())
        file.close()
        assert main(["diagnose"]) == code
    assert "ended without an error in phase train" in capsys.readouterr().out


def test_a_run_of_which_nothing_is_known(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(home / "store")
    storage.runs.begin("a" * 64, "early")
    storage.runs.use("a" * 64, ONE)
    assert main(["diagnose", "early"]) == 2
    assert "early has no stage with a specification" in capsys.readouterr().err


def test_the_report_links_the_diagnosis(home: Path) -> None:
    stage(home, ONE, 1, [0.5, 0.5, 0.01, 0.01])
    recipe = RECIPE.model_copy(update={"location": LocationConfig(home=str(home))})
    result = StageResult(
        label="rl_round_1",
        fingerprint=ONE,
        artifact=Artifact(kind="policy", uri="/x", digest="0" * 64),
        reused=False,
        wall_s=1.0,
        metrics={},
        job_seconds={},
    )
    history = StageHistory(open_storage(str(home / "store")))
    directory = write_report(build_report(recipe, [result], 1.0), recipe, history)
    told = (directory / "report.md").read_text()
    assert "[Diagnosis](diagnosis.html): entropy_collapse (rl_round_1).\n" in told
    assert "entropy_collapse" in (directory / "diagnosis.md").read_text()
