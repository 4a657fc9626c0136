"""`rlhf engines` for people, for programs, and beside a plugin that is broken."""

import json

import pytest

from engines.config.backends import BACKENDS
from flows.commands.cli import main
from infra import env

BROKEN = "no_such_module_of_a_plugin"


def test_a_pipe_gets_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    printed = capsys.readouterr().out
    assert all(backend in printed for backend in BACKENDS)
    assert "make env-automodel" in printed
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
    assert {row["backend"] for row in json.loads(said.out)} == set(BACKENDS)
