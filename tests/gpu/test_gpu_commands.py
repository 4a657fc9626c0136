"""The commands `make gpu-check` and `make gpu-pipeline` on a CPU."""

import subprocess
import sys
from pathlib import Path

import gpu_check as check
import gpu_pipeline as pipeline
import pytest

HERE = Path(__file__).resolve().parent
DEADLINE_S = 600.0
REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one[cpu]" time="0.5"/>
<testcase classname="tests.gpu.test_a" name="test_one[nvidia]" time="0.1">
  <skipped message="Skipped: needs one NVIDIA GPU"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_two" time="1.0">
  <failure message="AssertionError: 3 is not 4&#10;more">trace</failure></testcase>
<testcase classname="tests.gpu.test_a" name="test_three" time="1.0">
  <error message="failed on teardown">trace</error></testcase>
<testcase classname="tests.gpu.test_b" name="test_four" time="0.0">
  <skipped message="needs 2 NVIDIA GPUs"/></testcase>
</testsuite></testsuites>"""


def test_a_row_per_test_with_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    rows = check.rows_of(tmp_path / "report.xml")
    assert rows == [
        check.Row("test_a::test_one", 1, 0, 1, 0.6, "needs one NVIDIA GPU"),
        check.Row("test_a::test_two", 0, 1, 0, 1.0, "AssertionError: 3 is not 4"),
        check.Row("test_a::test_three", 0, 1, 0, 1.0, "failed on teardown"),
        check.Row("test_b::test_four", 0, 0, 1, 0.0, "needs 2 NVIDIA GPUs"),
    ]
    assert [row.verdict for row in rows] == ["passed", "FAILED", "FAILED", "skipped"]
    assert "| test_a::test_one | passed | 1/1 (1 skipped) | 0.6 |" in check.table(rows)


def test_a_part_at_its_limit_has_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    endless = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    code = check.ended(endless, 5.0, log)
    row = check.failure("tests/gpu", code, log)
    assert code is None
    assert row.verdict == "FAILED"
    assert row.detail.startswith("ended at the time limit")


def test_a_consistency_row_has_value_and_bound() -> None:
    lines = (
        '{"name": "digest", "value": 0.0, "bound": 1, "at_least": true, "passes": false}',
        "a warning of a library",
        '{"name": "mean", "value": 0.01, "bound": 0.03, "at_least": false, "passes": true}',
    )
    bad, good = check.consistency_rows(lines)
    assert (bad.verdict, bad.detail) == ("FAILED", "0; at least 1")
    assert (good.verdict, good.detail) == ("passed", "0.01; at most 0.03")


def test_overhead_counts_each_job_once() -> None:
    work = {"load": 6.0, "train": 3.0, "gen": 2.0, "reward": 1.0, "save": 1.0, "total": 13.0}
    stages = [
        {"fingerprint": "a", "reused": False, "job_seconds": {"preprocess": 4.0, "load": 1.0}},
        {"fingerprint": "b", "reused": False, "job_seconds": work},
        {"fingerprint": "b", "reused": False, "job_seconds": work},
        {"fingerprint": "c", "reused": True, "job_seconds": {"train": 100.0}},
    ]
    assert pipeline.overhead_of(stages, 40.0) == pytest.approx(1 - (4 + 3 + 2 + 1) / 40)


@pytest.mark.slow
def test_the_checks_run_on_a_cpu() -> None:
    """The consistency run and two files of tests; the twins of all are tests of their own."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "gpu_check.py"), "--device", "cpu",
         "--keyword", "test_product_name_peak_and_uuid or test_several_devices"],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = ended.stdout.splitlines()
    assert any("test_several_devices" in row and "needs 2 NVIDIA GPUs" in row for row in rows)
    assert sum(row.startswith("| consistency: ") and "| passed |" in row for row in rows) == 10
    assert " 0 failed, " in rows[-1]


@pytest.mark.stacks
def test_a_pipeline_promotes_a_model_that_loads() -> None:
    ended = subprocess.run(
        [sys.executable, str(HERE / "gpu_pipeline.py"), "--device", "cpu", "--limit-s", "560"],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tiny: promoted, and the model loads" in ended.stdout
    assert "| rl_round_1 | " in ended.stdout
    assert "outside engine work " in ended.stdout
