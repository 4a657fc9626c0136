"""The frame of a job, as a process: exit codes, error.json, one line for the user."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra import env
from infra.store.canonical import canonical_json, sha256_file
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage
from infra.store.work_channel import JobProblem
from infra.tracking.journal import Journal

HOLDER = Holder(id="test", process="test")

JOBS = Path(__file__).resolve().parents[5] / "engines" / "jobs" / "__init__.py"
NO_VARIABLES: Mapping[str, str] = {}
PROMOTE = {"promote": {"metric": "accuracy", "min_value": 0.5}}


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    """A promote stage whose inputs are in a store."""
    store = LocalStorage(tmp_path / "store")
    inputs = {}
    for kind, name, content in (
        ("evaluation", "summary.json", {"metrics": {"accuracy": 0.75}}),
        ("model", "config.json", {}),
    ):
        directory = tmp_path / kind
        directory.mkdir()
        (directory / name).write_bytes(canonical_json(content))
        inputs[kind] = store.publish(directory, kind)
    return StageSpec(
        stage="promote",
        job_module="engines.jobs.promote",
        fingerprint="ab" * 32,
        attempt=0,
        holder="test",
        config=PROMOTE,
        inputs=inputs,
        seed=0,
        store_uri=str(tmp_path / "store"),
        runtime={},
    )


def run(
    spec: StageSpec, environment: Mapping[str, str] = NO_VARIABLES, **changes: Any
) -> "subprocess.CompletedProcess[str]":
    changed = spec.model_copy(update=changes)
    store = LocalStorage(Path(spec.store_uri))
    if len(store.attempts.entries(spec.fingerprint)) == changed.attempt:
        store.attempts.hold(spec.fingerprint, HOLDER, changed.attempt)
    store.channel(spec.fingerprint).write_specification(changed)
    return start(spec.store_uri, spec.fingerprint, str(changed.attempt), **environment)


def start(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "engines.jobs.promote", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env.child_environment(**environment),
    )


def error(spec: StageSpec) -> JobProblem:
    problem = LocalStorage(Path(spec.store_uri)).channel(spec.fingerprint).read_error(spec.attempt)
    assert problem is not None
    return problem


def test_a_job_publishes_and_commits_itself(spec: StageSpec) -> None:
    done = run(spec)
    assert done.returncode == 0, done.stderr
    record = LocalStorage(Path(spec.store_uri)).lookup(spec.fingerprint)
    assert record is not None
    assert (record.stage, record.attempt, record.artifact.kind) == ("promote", 0, "promotion")
    assert record.metrics == {"accuracy": 0.75, "promoted": 1.0}
    assert 0 < record.seconds["load"] <= record.seconds["total"]
    channel = LocalStorage(Path(spec.store_uri)).channel(spec.fingerprint)
    assert channel.read_error(0) is None
    assert channel.read_beat(0) is not None
    assert not (channel.local_dir(0) / "output").exists()


def test_a_committed_job_removes_what_only_its_retry_would_need(spec: StageSpec) -> None:
    channel = LocalStorage(Path(spec.store_uri)).channel(spec.fingerprint)
    step = channel.steps_dir(0) / "step-00000001"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(b"x")
    with Journal(channel.local_dir(0) / "journal.jsonl") as journal:
        journal.progress(1, 2)
    (channel.local_dir(0) / "hf").mkdir()
    failed = run(spec, {"RLHF_FAULTS": "storage.before_commit=raise"})
    assert failed.returncode == 1
    assert step.exists(), "the next attempt continues from it"
    done = run(spec, attempt=1)
    assert done.returncode == 0, done.stderr
    assert not channel.steps_dir(0).exists()
    assert not (channel.local_dir(0) / "hf").exists()
    assert (channel.local_dir(0) / "error.json").exists()


def test_a_disk_that_frees_nothing_costs_no_result(spec: StageSpec) -> None:
    store = LocalStorage(Path(spec.store_uri))
    steps = store.channel(spec.fingerprint).steps_dir(0)
    steps.parent.mkdir(parents=True)
    steps.write_text("not a directory")
    done = run(spec)
    assert done.returncode == 0
    assert "the working files of a committed stage stay" in done.stderr
    assert store.lookup(spec.fingerprint) is not None


def test_other_code_than_planned_is_refused_by_its_name(spec: StageSpec) -> None:
    sources = {"engines.jobs.promote": "0" * 64, "engines.jobs": sha256_file(JOBS)}
    ended = run(spec, sources=sources)
    assert ended.returncode == 2
    assert "engines.jobs.promote;" in ended.stderr


def test_other_libraries_than_planned_are_refused_by_name(spec: StageSpec) -> None:
    ended = run(spec, sources={"engines.jobs": sha256_file(JOBS)}, libraries={"numpy": "0.1"})
    assert ended.returncode == 2
    assert "numpy" in ended.stderr
    assert "for 0.1" in ended.stderr


def test_hanging_job_ends_itself_at_its_phase_deadline(spec: StageSpec) -> None:
    runtime = {"heartbeat_s": 0.05, "progress_deadlines_s": {"publish": 2.0}}
    ended = run(spec, {"RLHF_FAULTS": "storage.before_publish=sleep:50"}, runtime=runtime)
    assert ended.returncode == 1
    assert (error(spec).type, error(spec).cause) == ("NoProgressError", "hang")
    assert "no progress in phase publish for 2 s" in error(spec).message
    assert "raise progress_deadlines_s.publish" in error(spec).message
    directory = LocalStorage(Path(spec.store_uri)).channel(spec.fingerprint).local_dir(0)
    assert "in publish" in (directory / "stacks.txt").read_text()


def test_a_job_that_has_no_memory_left_says_so_with_its_phase(spec: StageSpec) -> None:
    ended = run(spec, {"RLHF_FAULTS": f"storage.before_publish=memory:{2**50}"})
    assert ended.returncode == 1
    found = error(spec)
    assert (found.type, found.cause, found.phase) == ("MemoryError", "out_of_memory", "save")
    assert found.message.startswith("out of memory in phase save: MemoryError; at its peak this")


def test_a_job_whose_attempt_is_over_computes_nothing(spec: StageSpec) -> None:
    assert run(spec).returncode == 0
    again = run(spec)
    assert again.returncode == 1
    assert error(spec).type == "FencedError"
    record = LocalStorage(Path(spec.store_uri)).lookup(spec.fingerprint)
    assert record is not None
    assert record.attempt == 0


def test_leftovers_of_a_killed_attempt_are_not_published(spec: StageSpec) -> None:
    store = LocalStorage(Path(spec.store_uri))
    output = store.channel(spec.fingerprint).local_dir(0) / "output"
    output.mkdir()
    (output / "half-written").write_text("x", encoding="utf-8")
    assert run(spec).returncode == 0
    record = LocalStorage(Path(spec.store_uri)).lookup(spec.fingerprint)
    assert record is not None
    assert sorted(p.name for p in Path(record.artifact.uri).iterdir()) == [
        "decision.json",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"config": {"promote": {"metric": "pass@4"}}},
            "promote.metric: got 'pass@4'; need one of: accuracy",
        ),
        (
            {"config": {"promote": {"min_valeu": 1}}},
            "config.promote.min_valeu: unknown field; did you mean min_value?",
        ),
        ({"inputs": {}}, "inputs.evaluation: missing; need an artifact; given: none"),
        ({"runtime": {"heartbeat_s": 0}}, "runtime.heartbeat_s: got 0; need a finite number > 0"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    spec: StageSpec, changes: dict[str, Any], line: str
) -> None:
    done = run(spec, **changes)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    found = error(spec)
    assert (found.type, found.exit_code) == ("ConfigError", 2)
    assert found.message + "\n" == done.stderr


def test_a_spec_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "work/aa/attempt-1/spec.json"
    path.parent.mkdir(parents=True)
    path.write_text("{", encoding="utf-8")
    for arguments, text in (
        ([], "argv: got []; need STORE FINGERPRINT ATTEMPT"),
        (["s4://bucket", "aa", "0"], "storage: got 's4://bucket'"),
        ([str(tmp_path), "aa", "0"], f"{path.parent.parent}/attempt-0/spec.json: does not exist"),
        ([str(tmp_path), "aa", "1"], f"{path}: not JSON"),
    ):
        done = start(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(text)
        assert done.stderr.count("\n") == 1


def test_the_debug_switch_adds_the_traceback(tmp_path: Path) -> None:
    done = start(str(tmp_path), "aa", "0", RLHF_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_any_other_error_is_exit_code_1_with_its_traceback(spec: StageSpec) -> None:
    damaged = Path(spec.inputs["evaluation"].uri) / "summary.json"
    damaged.chmod(0o644)
    damaged.write_text("{}", encoding="utf-8")
    done = run(spec)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert error(spec).type == "ArtifactCorruptError"


@pytest.mark.parametrize("module", ["process.runtime", "preprocess", "compare", "promote"])
def test_jobs_that_need_no_torch_do_not_import_it(module: str) -> None:
    code = (
        f"import sys, engines.jobs.{module}; "
        "heavy = {'torch', 'transformers', 'ray', 'mlflow', 'pandas', 'prefect'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_modules_that_register_plugins_are_imported_first(spec: StageSpec, tmp_path: Path) -> None:
    (tmp_path / "my_plugins.py").write_text("print('registered')", encoding="utf-8")
    run(spec)
    arguments = (spec.store_uri, spec.fingerprint, "0")
    paths = {"PYTHONPATH": str(tmp_path)}
    done = start(*arguments, RLHF_USE_EXTERNAL_MODULES="my_plugins", **paths)
    assert done.stdout == "registered\n"
    done = start(*arguments, RLHF_USE_EXTERNAL_MODULES="my_plugins, absent_module", **paths)
    assert (done.returncode, done.stdout) == (1, "registered\n")
    line = "environment.RLHF_USE_EXTERNAL_MODULES: absent_module cannot be imported"
    assert done.stderr.count(line) == 1
