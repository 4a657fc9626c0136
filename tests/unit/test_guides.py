"""Guides to parts, followed to the letter: one file, one row, and the contract that they name."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    keep_the_contract(tmp_path, command, register="my_package.register")
    example = ROOT / "tests" / "plugin_example" / "example_chip" / "tracker.py"
    assert tracker == example.read_text(encoding="utf-8")


def test_the_guide_to_a_preprocessor(tmp_path: Path) -> None:
    text = guide("add-a-preprocessor.md")
    preprocessor, row = python_blocks(text)
    (command,) = contract_commands(text)
    package(tmp_path, flashcards=preprocessor, register=row)
    rows = [{"front": "2 + 2", "back": "4"}, {"front": "chat", "back": "cat"}]
    (tmp_path / "sample.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keep_the_contract(tmp_path, command, register="my_package.register")


def test_the_guide_to_a_reward(tmp_path: Path) -> None:
    text = guide("add-a-reward.md")
    reward, row = python_blocks(text)
    by_file, by_name = contract_commands(text)
    (tmp_path / "my_reward.py").write_text(reward)
    case = {"right": "it is 42", "wrong": "it is 41", "ground_truth": "42"}
    (tmp_path / "cases.jsonl").write_text(f"{json.dumps(case)}\n")
    keep_the_contract(tmp_path, by_file)
    options = "from engines.config.base import StrictModel\n\n\nclass MineOptions(StrictModel):\n"
    package(tmp_path, reward=reward, register=row, options=f"{options}    strict: bool = False\n")
    keep_the_contract(tmp_path, by_name, register="my_package.register")


@pytest.mark.slow
def test_the_guide_to_a_rollout_engine(tmp_path: Path) -> None:
    engine, register = python_blocks(guide("add-a-rollout-engine.md"))
    (command,) = contract_commands(guide("add-a-rollout-engine.md"))
    (tmp_path / "my_engine.py").write_text(engine)
    (tmp_path / "my_registration.py").write_text(register)
    # Each waits for a deadline.
    fast = ("-k", "not test_deadline_and_close")
    keep_the_contract(tmp_path, command, *fast, register="my_registration")


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
