"""The command `rlhf show`: which run is meant, and where its page is."""

import json
import os
from pathlib import Path

import pytest

from flows.commands.cli import main
from infra.store.canonical import sha256_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal
from infra.tracking.ledger import Ledger, Owner, RunEntry
from infra.tracking.samples import KeptSample, KeptStep, write_samples

ONE, TWO, OTHER, EDITED, SFT = ("1a" * 32, "2b" * 32, "3c" * 32, "4d" * 32, "5e" * 32)
ANSWERS = {ONE: "one", TWO: "two", OTHER: "other", EDITED: "before the edit"}


def stage(storage: LocalStorage, fingerprint: str, number: int, steps: range) -> None:
    """A stage that runs: its first attempt died before it had a specification."""
    storage.attempts.hold(fingerprint, Holder(id="a", process="test"), 0)
    storage.attempts.hold(fingerprint, Holder(id="b", process="test"), 1)
    spec = StageSpec(
        stage="rl_round" if fingerprint in ANSWERS else "sft",
        job_module="engines.jobs.rl_round",
        fingerprint=fingerprint,
        attempt=1,
        config={"round": number},
        inputs={},
        seed=0,
        store_uri=storage.uri,
    )
    channel = storage.channel(fingerprint)
    channel.write_specification(spec)
    if fingerprint not in ANSWERS:
        return
    sample = KeptSample(
        name="s",
        group=0,
        prompt="1+1=",
        tokens=(ANSWERS[fingerprint],),
        num_tokens=1,
        score=1.0,
        reward=1.0,
        finish_reason="stop",
    )
    with Journal(channel.local_dir(1) / "journal.jsonl") as journal:
        for step in steps:
            journal.metrics(step, {"critic/score/mean": step / 10})
            write_samples(channel.local_dir(1), KeptStep(step=step, samples=(sample,)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs: of the first, which is the older one, round 1 was edited."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    storage = LocalStorage(tmp_path / "store")
    stage(storage, ONE, 1, range(1, 3))
    stage(storage, TWO, 2, range(3, 5))
    stage(storage, OTHER, 1, range(1, 3))
    stage(storage, EDITED, 1, range(1, 3))
    stage(storage, SFT, 0, range(0))
    used = {"a" * 64: ("first", (EDITED, ONE, TWO, SFT)), "b" * 64: ("second", (OTHER,))}
    used[sha256_json({"flow_run_id": "c0ffee-1"})] = ("first", (SFT,))
    at = 1e9
    for key, (name, fingerprints) in used.items():
        storage.runs.begin(key, name)
        for fingerprint in fingerprints:
            storage.runs.use(key, fingerprint)
            at += 1 if name != "second" else 1e6
            os.utime(tmp_path / "store" / "runs" / key / "stages" / fingerprint, (at, at))
    return tmp_path


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Path, list[dict]]:
    """Where a page is, and the runs in it."""
    assert main(["show", *arguments]) == 0
    path = Path(capsys.readouterr().out.strip())
    data = path.read_text().partition('id="data">')[2].partition("</script>")[0]
    return path, json.loads(data)


def answers(run: dict) -> dict[str, str]:
    return {step: samples[0]["tokens"][0] for step, samples in run["steps"].items()}


def test_a_run_is_shown_by_its_name_over_all_rounds(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalStorage(home / "store").runs.forget(sha256_json({"flow_run_id": "c0ffee-1"}))
    path, (run,) = page(capsys, "first")
    assert path == home / "runs" / "first" / "samples.html"
    assert answers(run) == {"1": "one", "2": "one", "3": "two", "4": "two"}
    assert run["curves"]["reward"] == [[1, 0.1], [2, 0.2], [3, 0.3], [4, 0.4]]


def test_without_a_name_it_is_the_latest_run(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalStorage(home / "store").runs.forget(sha256_json({"flow_run_id": "c0ffee-1"}))
    assert page(capsys)[1][0]["name"] == "second"


def test_a_stage_is_meant_by_the_beginning_of_its_fingerprint(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers(page(capsys, TWO[:8])[1][0]) == {"3": "two", "4": "two"}


def test_run_and_stage_are_found_by_their_tracker_ids(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, owner = Ledger(home, "sqlite:///x", "store"), Owner.this_process()
    run = RunEntry(key="b" * 64, name="second", owner=owner, run_id="m1")
    ledger.put(run.model_copy(update={"tags": {"flow_run_id": "p1"}}))
    of_stage = {"parent": "a" * 64, "fingerprint": ONE, "run_id": "m2"}
    ledger.settle(RunEntry(key="d" * 64, name="rl_round_1", owner=owner, **of_stage))
    for asked in ("m1", "p1"):
        assert answers(page(capsys, asked)[1][0]) == {"1": "other", "2": "other"}
    assert answers(page(capsys, "m2")[1][0]) == {"1": "one", "2": "one"}


def test_two_runs_are_put_beside_each_other(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = page(capsys, TWO[:8], "--against", "second")
    assert path == home / "runs" / "first" / "against-second.html"
    assert [run["name"] for run in runs] == ["first", "second"]
    out = tmp_path / "elsewhere" / "page.html"
    assert page(capsys, "second", "--out", str(out))[0] == out


def test_what_cannot_be_shown_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "thirdd"]) == 2
    known = "need a run of this store: first, second"
    assert capsys.readouterr().err == f"RUN: got 'thirdd'; {known}\n"
    assert main(["show", "second", "--against", "c0ffee-1"]) == 2
    assert capsys.readouterr().err.startswith("--against: first has no step of RL to show; wait")


def test_a_home_without_runs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert main(["show"]) == 2
    assert capsys.readouterr().err == "RUN: got no run; need a run of this store: none yet\n"
