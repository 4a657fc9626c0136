"""Guides to parts, followed to the letter: one file, one row, and the contract that they name."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import loaded_rows
import pytest
import yaml

from engines.config.data import DataConfig, SourceConfig
from engines.config.options import check_preprocessors
from engines.config.plugins import recognised_layouts
from engines.rewards.base import SampledTokens, ScoreRequest
from flows.recipe.recipe import load_recipe
from infra import env

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"


def guide(name: str) -> str:
    return (GUIDES / name).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def contract_commands(text: str) -> list[str]:
    """Arguments of pytest, as the guide gives them."""
    return re.findall(r"^pytest (.*)$", text, re.MULTILINE)


def registering(text: str) -> str:
    """The module that the guide has listed before it runs its contract."""
    (module,) = re.findall(r"^export PYTHONPATH=\$PWD RLHF_USE_EXTERNAL_MODULES=(\S+)", text, re.M)
    return module


def keep_the_contract(directory: Path, command: str, *options: str, register: str = "") -> None:
    """Run it beside the files; every test of it passes and none is skipped."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *shlex.split(command),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=directory,
        env=env.child_environment(
            PYTHONPATH=str(directory), RLHF_USE_EXTERNAL_MODULES=register, OMP_NUM_THREADS="1"
        ),
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    last = ended.stdout.strip().splitlines()[-1]
    assert re.search(r"^\d+ passed(, \d+ deselected)? in ", last), last


def package(directory: Path, **modules: str) -> Path:
    (directory / "my_package").mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (directory / "my_package" / f"{name}.py").write_text(text)
    return directory


def test_the_guide_to_a_tracker(tmp_path: Path) -> None:
    text = guide("add-a-tracker.md")
    tracker, row = python_blocks(text)
    (command,) = contract_commands(text)
    package(tmp_path, tracker=tracker, register=row)
    keep_the_contract(tmp_path, command, register=registering(text))
    example = ROOT / "tests" / "plugin_example" / "example_chip" / "tracker.py"
    assert tracker == example.read_text(encoding="utf-8")


def test_the_guide_to_a_preprocessor(tmp_path: Path) -> None:
    text = guide("add-a-preprocessor.md")
    preprocessor, row = python_blocks(text)
    (command,) = contract_commands(text)
    package(tmp_path, flashcards=preprocessor, register=row)
    rows = [{"front": "2 + 2", "back": "4"}, {"front": "chat", "back": "cat"}]
    (tmp_path / "sample.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keep_the_contract(tmp_path, command, register=registering(text))


def test_the_guide_to_a_data_set(tmp_path: Path) -> None:
    text = guide("add-a-data-set.md")
    table = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    samples, with_tools = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _, _ in table) == sorted(recognised_layouts())
    # Bytes of images stand in no JSON; `tests/unit/.../test_geometry3k.py` writes such tables.
    written = [row for row in table if row[0] != "geometry3k"]
    for (name, columns, kinds), sample in zip(written, samples.splitlines(), strict=True):
        assert {*re.findall(r"`(\w+)`", columns)} <= {*json.loads(sample)}
        path = tmp_path / f"{name}.jsonl"
        path.write_text(sample)
        source = SourceConfig(path=str(path))
        for kind in kinds.split(", "):
            loaded = loaded_rows.load(kind, source)
            assert loaded.reports[0].format == name
    for sample, name in zip(with_tools.splitlines(), ("messages", "sharegpt"), strict=True):
        path = tmp_path / f"{name}-tools.jsonl"
        path.write_text(sample)
        loaded = loaded_rows.load("sft", SourceConfig(path=str(path)))
        (row,) = loaded.rows
        assert loaded.reports[0].format == name
        assert [each.role for each in row.messages] == ["user", "assistant", "tool", "assistant"]
        assert row.messages[0].tools
        assert row.messages[1].tool_calls
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        check_preprocessors(DataConfig.model_validate(yaml.safe_load(block)["data"]))
    (whole,) = [block for block in blocks if "model" in yaml.safe_load(block)]
    (tmp_path / "images.yaml").write_text(whole)
    load_recipe(str(tmp_path / "images.yaml"))


def test_the_guide_to_a_reward(tmp_path: Path) -> None:
    text = guide("add-a-reward.md")
    reward, row = python_blocks(text)
    by_file, by_name = contract_commands(text)
    (tmp_path / "my_reward.py").write_text(reward)
    (case,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "cases.jsonl").write_text(case)
    keep_the_contract(tmp_path, by_file)
    options = "from engines.config.base import StrictModel\n\n\nclass MineOptions(StrictModel):\n"
    package(tmp_path, reward=reward, register=row, options=f"{options}    strict: bool = False\n")
    keep_the_contract(tmp_path, by_name, register=registering(text))


def test_the_guide_to_an_algorithm(tmp_path: Path) -> None:
    text = guide("add-an-algorithm.md")
    loss, row, register_loss, estimator, register_estimator = python_blocks(text)
    (command,) = contract_commands(text)
    package(
        tmp_path,
        plain_gradient=loss,
        median=estimator,
        register=f"{register_loss}\n{register_estimator}",
    )
    keep_the_contract(tmp_path, command, register=registering(text))
    _, of_row = written_call(row)
    (_, name, _), of_call = written_call(register_loss)
    assert of_row.pop("target") == "engines.algorithms.plain_gradient:plain_gradient_loss"
    assert of_row == {"name": name, **of_call}


def written_call(code: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the call that is the last line of some code."""
    last = ast.parse(code).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in last.value.keywords}
    return [ast.literal_eval(argument) for argument in last.value.args], named


def test_what_the_guides_name_is_there() -> None:
    parts = ("add-an-algorithm.md", "add-a-reward.md", "add-a-rollout-engine.md")
    text = "".join(map(guide, parts))
    for module, name in re.findall(r"[`\"](engines[\w.]+):(\w+)[`\"]", text):
        assert name == "plain_gradient_loss" or hasattr(importlib.import_module(module), name)
    fields = {each.name for of in (ScoreRequest, SampledTokens) for each in dataclasses.fields(of)}
    shown = re.search(r"sees the whole\nsample (.*?)\. A function", guide(parts[1]), re.DOTALL)
    assert shown
    named = set(re.findall(r"`(?:sample\.)?(\w+)`", shown[1]))
    assert named == fields - {"model_score", "judgement"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "rlhf.testing.test_algorithm -k plain",
            "absent_module cannot be imported (ModuleNotFound",
        ),
        (
            "rlhf.testing.test_reward --reward exact --reward-cases cases.jsonl",
            "cases.jsonl: need ['ground_truth', 'right', 'wrong'] in each line",
        ),
    ],
)
def test_a_contract_says_what_it_lacks(tmp_path: Path, command: str, said: str) -> None:
    (tmp_path / "cases.jsonl").write_text('{"right": "42"}\n')
    with pytest.raises(AssertionError) as caught:
        keep_the_contract(tmp_path, f"--pyargs {command}", register="absent_module")
    assert said in str(caught.value)


@pytest.mark.slow
def test_the_guide_to_a_rollout_engine(tmp_path: Path) -> None:
    text = guide("add-a-rollout-engine.md")
    engine, register = python_blocks(text)
    (command,) = contract_commands(text)
    (tmp_path / "my_engine.py").write_text(engine)
    (tmp_path / "my_registration.py").write_text(register)
    # Each waits for a deadline.
    fast = ("-k", "not test_deadline_and_close")
    keep_the_contract(tmp_path, command, *fast, register=registering(text))


@pytest.mark.slow
def test_the_guide_to_a_backend(tmp_path: Path) -> None:
    """One rank and two; the whole contract is a matter of minutes."""
    text = guide("add-a-backend.md")
    engine, register = python_blocks(text)
    command = contract_commands(text)[0]
    (tmp_path / "my_backend.py").write_text(engine)
    (tmp_path / "my_registration.py").write_text(register)
    trains = ("-k", "test_trains_as_a_plain_loop_does", "-m", "not slow")
    keep_the_contract(tmp_path, command, *trains, register="my_registration")
