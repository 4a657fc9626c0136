"""`rlhf engines` for people, for programs, and beside a plugin that is broken."""

import json
from dataclasses import astuple

import pytest

from engines.config.backends import BACKENDS
from engines.config.plugins import ROLLOUT_ENGINES, register_plugin
from flows.commands.cli import main
from flows.commands.engines import HEADINGS, engine_matrix, folded, rollout_matrix
from infra import env

BROKEN = "no_such_module_of_a_plugin"


def test_a_pipe_gets_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    printed = capsys.readouterr().out
    assert all(backend in printed for backend in BACKENDS)
    assert "make env-automodel" in printed
    (vllm,) = [line for line in printed.splitlines() if line.startswith("vllm")]
    assert "make env-vllm" in vllm
    assert "installed" in vllm
    assert "prefix_cache" in vllm
    assert "tensor_parallel_size" in vllm
    assert "language_model" in printed
    assert "\u2026" not in printed, "nothing is cut"


def test_a_broken_module_costs_one_line_beside_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.RLHF_USE_EXTERNAL_MODULES.name, BROKEN)
    for arguments in (["engines"], ["engines", "--json"]):
        assert main(arguments) == 0
        said = capsys.readouterr()
        assert all(backend in said.out for backend in BACKENDS)
        assert len(said.err.splitlines()) == 1
        assert f"{BROKEN} cannot be imported" in said.err
    tables = json.loads(said.out)
    assert {row["backend"] for row in tables["training"]} == set(BACKENDS)
    assert {row["engine"] for row in tables["rollout"]} == set(ROLLOUT_ENGINES.names())


def test_what_was_registered_at_run_time_says_so_beside_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("rollout", "mine", "my_engine:Mine")
    register_plugin("backend", "mine", "my_engine:Mine")
    assert list(rollout_matrix(installed=True))[-1].needs == "registered at run time"
    assert list(engine_matrix(installed=True))[-1].needs == "registered at run time"


def test_rows_that_differ_in_the_model_type_alone_are_one() -> None:
    rows = list(engine_matrix(installed=False))
    shown = folded(rows)
    assert len(shown) < len(rows)
    assert sum(row.model_type.count(",") + 1 for row in shown) == len(rows)
    [veomni] = [r for r in shown if (r.backend, r.device) == ("veomni", "cpu")]
    assert veomni.model_type == "language_model, value_model"


def test_the_matrix_has_a_row_per_engine_and_device() -> None:
    rows = list(engine_matrix(installed=False))
    expected = {
        (name, model_type, device)
        for name, backend in BACKENDS.items()
        for model_type in backend.targets
        for device in backend.devices
    }
    assert {(r.backend, r.model_type, r.device.partition(" ")[0]) for r in rows} == expected
    assert all(len(astuple(row)) == len(HEADINGS) for row in rows)
    on_gpu = next(r for r in rows if r.backend == "fsdp2" and r.device.startswith("cuda"))
    assert on_gpu.device == "cuda (one rank: gpu)"
    assert on_gpu.parallelism.startswith("cpu twin: data")
