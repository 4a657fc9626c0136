"""The frame of a job, as a process: exit codes, error.json, one line for the user."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import env
from infra.store.canonical import canonical_json, sha256_file
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage

JOBS = Path(__file__).resolve().parents[4] / "engines" / "jobs" / "__init__.py"
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
        inputs[kind] = store.publish(directory, kind, None)
    return StageSpec(
        stage="promote",
        job_module="engines.jobs.promote",
        fingerprint="ab" * 32,
        attempt=0,
        config=PROMOTE,
        inputs=inputs,
        seed=0,
        store_uri=str(tmp_path / "store"),
        work_dir=tmp_path / "work",
        runtime={},
    )


def run(spec: StageSpec, **changes: Any) -> "subprocess.CompletedProcess[str]":
    changed = spec.model_copy(update=changes)
    changed.attempt_dir.mkdir(parents=True, exist_ok=True)
    path = changed.attempt_dir / "spec.json"
    path.write_text(changed.model_dump_json(), encoding="utf-8")
    return start(str(path))


def start(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "engines.jobs.promote", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env.child_environment(**environment),
    )


def error(spec: StageSpec) -> dict[str, Any]:
    return json.loads((spec.attempt_dir / "error.json").read_text(encoding="utf-8"))


def test_a_job_publishes_and_commits_itself(spec: StageSpec) -> None:
    done = run(spec)
    assert done.returncode == 0, done.stderr
    record = LocalStorage(Path(spec.store_uri)).committed(spec.fingerprint)
    assert record is not None
    assert (record.stage, record.attempt, record.artifact.kind) == ("promote", 0, "promotion")
    assert record.metrics == {"accuracy": 0.75, "promoted": 1.0}
    assert 0 < record.seconds["load"] <= record.seconds["total"]
    assert not (spec.attempt_dir / "error.json").exists()
    assert (spec.attempt_dir / "heartbeat.json").exists()
    assert not spec.output_dir.exists()


def test_other_code_than_planned_is_refused_by_its_name(spec: StageSpec) -> None:
    sources = {"engines.jobs.promote": "0" * 64, "engines.jobs": sha256_file(JOBS)}
    ended = run(spec, sources=sources)
    assert ended.returncode == 2
    assert "engines.jobs.promote;" in ended.stderr
    ended = run(spec, sources={"engines.jobs": sha256_file(JOBS)}, libraries={"numpy": "0.1"})
    assert ended.returncode == 2
    assert "numpy" in ended.stderr
    assert "for 0.1" in ended.stderr


def test_the_first_commit_stands(spec: StageSpec) -> None:
    assert run(spec).returncode == 0
    again = run(spec, attempt=1)
    assert again.returncode == 0
    assert "already committed" in again.stderr
    record = LocalStorage(Path(spec.store_uri)).committed(spec.fingerprint)
    assert record is not None
    assert record.attempt == 0


def test_leftovers_of_a_killed_attempt_are_not_published(spec: StageSpec) -> None:
    spec.output_dir.mkdir(parents=True)
    (spec.output_dir / "half-written").write_text("x", encoding="utf-8")
    assert run(spec).returncode == 0
    record = LocalStorage(Path(spec.store_uri)).committed(spec.fingerprint)
    assert record is not None
    assert sorted(p.name for p in record.artifact.local_path().iterdir()) == [
        "decision.json",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"config": {"promote": {"metric": "accuracyy"}}},
            "promote.metric: got 'accuracyy'; need one of: accuracy",
        ),
        (
            {"config": {"promote": {"min_valeu": 1}}},
            "config.promote.min_valeu: unknown field; did you mean min_value?",
        ),
        ({"inputs": {}}, "inputs.evaluation: missing; need an artifact; given: none"),
        ({"runtime": {"heartbeat_s": 0}}, "runtime.heartbeat_s: got 0; need a finite number > 0"),
        ({"store_uri": "s4://bucket"}, "storage: got 's4://bucket'"),
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
    assert (found["type"], found["exit_code"]) == ("ConfigError", 2)
    assert found["message"] + "\n" == done.stderr


def test_a_spec_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    absent, broken = tmp_path / "absent.json", tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    for arguments, text in (
        ([], "argv: got 0 arguments"),
        ([str(absent)], f"{absent}: does not exist"),
        ([str(broken)], f"{broken}: not JSON"),
    ):
        done = start(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(text)
        assert done.stderr.count("\n") == 1


def test_the_debug_switch_adds_the_traceback(tmp_path: Path) -> None:
    done = start(str(tmp_path / "absent.json"), RLHF_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_any_other_error_is_exit_code_1_with_its_traceback(spec: StageSpec) -> None:
    damaged = spec.inputs["evaluation"].local_path() / "summary.json"
    damaged.chmod(0o644)
    damaged.write_text("{}", encoding="utf-8")
    done = run(spec)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert error(spec)["type"] == "ArtifactCorruptError"


@pytest.mark.parametrize("module", ["runtime", "preprocess", "promote"])
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
    path = str(spec.attempt_dir / "spec.json")
    paths = {"PYTHONPATH": str(tmp_path)}
    done = start(path, RLHF_USE_EXTERNAL_MODULES="my_plugins", **paths)
    assert done.stdout == "registered\n"
    done = start(path, RLHF_USE_EXTERNAL_MODULES="my_plugins, absent_module", **paths)
    assert (done.returncode, done.stdout) == (0, "registered\n")
    line = "environment.RLHF_USE_EXTERNAL_MODULES: absent_module cannot be imported"
    assert done.stderr.count(line) == 1
