"""The GPU benchmarks on a CPU: figures, processes that end badly, and all of them once."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gpu_bench
import gpu_plan
import psutil
import pytest
import torch
from gpu_figures import Figure, Goal, NeedsError, NotMeasured, table
from gpu_models import SHAPES, Shape, write_model
from measure import Measurement
from safetensors.torch import load_file

from engines.config.training import TrainingConfig
from engines.cost.rank_bytes import train_bytes
from infra.waiting import wait_for

HERE = Path(__file__).parent
RUN_DEADLINE_S = 600.0


def test_a_shape_counts_the_weights_of_its_model(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    write_model(tmp_path, shape, torch.device("cpu"))
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(w.numel() for w in weights.values() if w.dim() > 1) == shape.num_weights


def test_flops_are_those_of_the_published_size() -> None:
    """6 N for the weights; scores: QK and PV, 2 * 2 * heads * head_dim * T / 2, thrice."""
    shape = SHAPES["qwen3-0.6b"]
    assert shape.num_weights == pytest.approx(0.596e9, rel=0.001)
    scores = 3 * (2 * 2 * 28 * 16 * 128 * 2048 / 2)
    assert shape.flops_per_token() == pytest.approx(6 * 0.596e9 + scores, rel=0.001)
    assert shape.flops_per_token(1024) < shape.flops_per_token(2048)


@pytest.mark.parametrize("name", [name for name in SHAPES if f"{name}-narrow" in SHAPES])
def test_a_narrow_model_has_as_many_layers(name: str) -> None:
    wide, narrow = SHAPES[name], SHAPES[f"{name}-narrow"]
    assert narrow.num_layers == wide.num_layers
    assert narrow.num_weights < wide.num_weights / 5


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [(Goal(0.4), 0.4, True), (Goal(0.4), 0.39, False),
     (Goal(1.3, at_most=True), 1.2, True), (Goal(1.3, at_most=True), 1.4, False)],
)  # fmt: skip
def test_a_goal_bounds_from_its_side(goal: Goal, value: float, reached: bool) -> None:
    figure = Figure("m", "what", "%", Measurement((value,)), goal)
    assert json.loads(figure.line())["reached"] is reached
    assert ("reached" if reached else "missed") in table([figure])


def test_the_table_shows_spread_shares_and_what_failed() -> None:
    figures = [
        Figure("sft", "all", "tokens/s", Measurement((900.0, 1000.0, 1200.0))),
        Figure("sft", "MFU", "%", Measurement((0.25,)), Goal(0.4)),
        NotMeasured("sync", "exit code 1: no memory", crashed=True),
    ]
    rows = table(figures).splitlines()[2:]
    assert rows[0] == "| sft | all | 1,000 tokens/s | 30 % |  |"
    assert rows[1] == "| sft | MFU | 25.0 % |  | at least 40.0 %: missed |"
    assert rows[2] == "| sync | not measured: exit code 1: no memory |  |  |  |"


def figure(value: float) -> Figure:
    return Figure("m", "what", "", Measurement((value,)))


def test_a_crash_keeps_what_was_measured_before() -> None:
    def crashing() -> Iterator[object]:
        yield figure(1.0)
        raise RuntimeError("out of memory")

    first, failed = gpu_bench.in_a_process(crashing, "m", 60.0)
    assert first == figure(1.0)
    assert failed == NotMeasured("m", "exit code 1: RuntimeError: out of memory", crashed=True)


def test_a_killed_measurement_is_a_crash() -> None:
    def killed() -> Iterator[object]:
        os.kill(os.getpid(), 9)
        yield figure(1.0)

    [failed] = gpu_bench.in_a_process(killed, "m", 60.0)
    assert isinstance(failed, NotMeasured)
    assert failed.crashed
    assert failed.reason.startswith("exit code -9")


def test_what_it_needs_is_no_crash() -> None:
    def needing() -> Iterator[object]:
        raise NeedsError("vLLM's environment")
        yield

    assert [*gpu_bench.in_a_process(needing, "m", 60.0)] == [
        NotMeasured("m", "needs vLLM's environment")
    ]


def test_the_limit_ends_it_and_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def endless() -> Iterator[object]:
        yield figure(1.0)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        file.write_text(str(child.pid))
        child.wait()

    # The limit leaves time to start the child even on a busy machine.
    found = [*gpu_bench.in_a_process(endless, "m", 10.0)]
    assert found[0] == figure(1.0)
    assert found[1:] == [NotMeasured("m", "ended at the time limit, with the figures above")]
    pid = int(file.read_text())
    wait_for(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie",
        "the child to end", 60.0,
    )  # fmt: skip


def test_one_without_time_left_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (gpu_bench.Row("long", lambda setup: iter([figure(1.0)]), (1e9, 1e9)),)
    monkeypatch.setattr(gpu_bench, "MEASUREMENTS", rows)
    [skipped] = gpu_bench.measured(setup_for(SHAPES["tiny"]), ["long"], time.monotonic() + 60)
    assert isinstance(skipped, NotMeasured)
    assert "it needs 1000000000" in skipped.reason


def test_a_tiny_model_has_no_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(figure(1.0), goal=Goal(2.0))
    rows = (gpu_bench.Row("row", lambda setup: iter([found]), (0, 0)),)
    monkeypatch.setattr(gpu_bench, "MEASUREMENTS", rows)
    for shape, expected in (("tiny", figure(1.0)), ("qwen3-0.6b", found)):
        setup = setup_for(SHAPES[shape])
        assert [*gpu_bench.measured(setup, ["row"], time.monotonic() + 60)] == [expected]


def test_the_planned_step_is_the_measured_one(tmp_path: Path) -> None:
    """Weights, gradients and moments of the written model; more tokens keep more."""
    setup = replace(setup_for(SHAPES["tiny"]), hf_dir=tmp_path)
    write_model(tmp_path, setup.shape, torch.device("cpu"))
    num_weights = sum(w.numel() for w in load_file(tmp_path / "model.safetensors").values())
    for_step = gpu_plan.planned_step(setup, TrainingConfig(dtype="float32"))
    found = train_bytes(for_step)
    assert found.parameter_bytes == 4 * num_weights
    assert found.moment_bytes == 8 * num_weights
    twice = replace(setup, shape=replace(setup.shape, num_sequences=8))
    more = train_bytes(gpu_plan.planned_step(twice, TrainingConfig(dtype="float32")))
    assert more.saved_bytes > 1.5 * found.saved_bytes


def setup_for(shape: Shape) -> gpu_bench.Setup:
    return gpu_bench.Setup(
        "cpu", shape, Path(), Path(), "float32", None, num_prompts=2, group_size=2,
        prompt_length=4, max_new_tokens=4, num_repeats=1,
    )  # fmt: skip


@pytest.mark.slow
def test_every_measurement_runs_on_a_cpu(tmp_path: Path) -> None:
    """But vLLM's, which has to start three times; the plan has no rates of a CPU."""
    out = tmp_path / "figures.jsonl"
    names = [row.name for row in gpu_bench.MEASUREMENTS if row.name != "vllm"]
    ended = subprocess.run(
        [sys.executable, str(HERE / "gpu_bench.py"), "--device", "cpu", "--limit-s", "500",
         "--peak-tflops", "0.1", "--out", str(out), "--only", *names],
        capture_output=True, text=True, timeout=RUN_DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stack, *figures = map(json.loads, out.read_text().splitlines())
    assert stack["stack"]["torch"] == torch.__version__
    assert stack["stack"]["commit"]
    assert [*dict.fromkeys(each["measurement"] for each in figures)] == names
    assert figures.pop()["reason"] == "needs a GPU: the plan has no rates of CPUs"
    assert all(each["value"] > 0 for each in figures), "a figure for each, and none crashed"
    for each in figures:
        assert f"| {each['measurement']} | {each['what']} |" in ended.stdout
