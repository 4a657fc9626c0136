"""Reward functions by name or file, checked without running them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from engines.config.algorithm import RewardConfig
from engines.config.plugins import REWARDS, register_plugin
from engines.rewards.base import Score, ScoreRequest
from engines.rewards.resolve import load, resolve
from engines.rewards.scorer import RewardScorer
from infra.errors import ConfigError, UnknownPluginError


def config(function: str, **kwargs: Any) -> RewardConfig:
    return RewardConfig(function=function, kwargs=kwargs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "raise SystemExit('the check ran the code')\n"
        "def compute_score(**kwargs): return 1.0\n"
        "async def judge(**kwargs): return 1.0\n"
        "alias = judge\n",
        encoding="utf-8",
    )
    return path


def test_registered_names() -> None:
    assert {"exact", "math"} <= set(REWARDS.names())
    assert resolve(config("exact", ignore_case=True)).function.in_process
    assert not resolve(config("math")).function.in_process
    with pytest.raises(
        UnknownPluginError, match=r"function: no 'exacd'; .*file\.py:name; .*exact\?"
    ):
        resolve(config("exacd"))
    with pytest.raises(ConfigError, match=r"rl\.reward\.kwargs\.ignorecase: not an option"):
        resolve(config("exact", ignorecase=True))


def test_files_are_checked_and_not_run(file: Path) -> None:
    for name, found in (("", "compute_score"), (":judge", "judge"), (":alias", "alias")):
        assert resolve(config(f"{file}{name}")).function.target == f"{file}:{found}"
    with pytest.raises(ConfigError, match="does not define 'other'; it defines: alias, compute"):
        resolve(config(f"{file}:other"))
    with pytest.raises(ConfigError, match=r"none\.py is no file \(cwd is"):
        resolve(config(f"{file.parent}/none.py:f"))
    file.write_text("def (:", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not Python"):
        resolve(config(str(file)))


def test_paths_are_those_of_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert resolve(config("mine.py:judge")).function.target == f"{file}:judge"


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("def f(**kwargs): return 2.0\n", encoding="utf-8")
    assert load(f"{path}:f")() == 2.0
    found = load("engines.rewards.text_rules:exact")("d", "1", "1")
    assert found == {"score": 1.0, "pred": "1"}


def test_a_name_belongs_to_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("reward", "mine", "elsewhere:f")
    assert resolve(config("mine")).function.target == "elsewhere:f"
    assert "mine" in REWARDS.names()
    register_plugin("reward", "mine", "elsewhere:g")
    register_plugin("reward", "exact", "elsewhere:f")
    for name in ("mine", "exact"):
        with pytest.raises(ConfigError, match=f"{name}' is registered by both .*elsewhere:f"):
            resolve(config(name))
    assert resolve(config("math", num_decimals=3)).function.memory_limit_bytes


VERL_STYLE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Verdict:
    right: bool
    note: str = "no more than a word"

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    told = Verdict(solution_str.strip() in ground_truth)
    return {
        "score": kwargs["bonus"] * told.right,
        "acc": told.right,
        "note": told.note,
        "difficulty": extra_info["difficulty"],
    }
"""


def test_a_file_in_verls_form_judges_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "verl_style.py"
    path.write_text(VERL_STYLE, encoding="utf-8")
    asked = [ScoreRequest("s", text, ["7", "07"], {"difficulty": 3}) for text in (" 7", "8")]
    with RewardScorer(config(str(path), bonus=0.5)) as scorer:
        right, wrong = scorer.score(asked)
    assert isinstance(right, Score)
    assert isinstance(wrong, Score)
    assert (right.value, wrong.value) == (0.5, 0.0)
    assert (right.extras["acc"], wrong.extras["acc"]) == (1.0, 0.0)
    assert right.extras["difficulty"] == 3.0


def test_same_named_files_load_apart_and_broken_one_unloads(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        path = tmp_path / str(number) / "same.py"
        path.parent.mkdir()
        path.write_text(f"def compute_score(**kwargs): return {number}.0\n", encoding="utf-8")
        found.append(load(f"{path}:compute_score"))
    assert [function() for function in found] == [1.0, 2.0]
    assert found[0].__module__ != found[1].__module__
    path.write_text("raise ValueError('broken')\n", encoding="utf-8")
    del sys.modules[found[1].__module__]
    with pytest.raises(ValueError, match="broken"):
        load(f"{path}:compute_score")
    assert found[1].__module__ not in sys.modules
