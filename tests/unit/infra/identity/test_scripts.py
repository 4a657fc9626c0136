"""A user's Python file counts with what it imports, and runs from a copy."""

from pathlib import Path

import pytest

from infra.errors import ConfigError
from infra.identity.fingerprint import project_modules, script_files
from infra.identity.imported_code import copy_script, script_artifact

FIELD = "rl.reward.function"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Imports a module and a package beside it, by every form of import."""
    files = {
        "score.py": "import json\nimport words\n\ndef f():\n    from rules.digits import parse\n",
        "words.py": "LIST = ['a']\n",
        "rules/__init__.py": "",
        "rules/digits.py": "from .signs import minus\n",
        "rules/signs.py": "minus = '-'\n",
        "rules/unused.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "mine" / "score.py"


def test_it_reaches_the_modules_beside_it_and_no_others(script: Path) -> None:
    assert list(script_files(script)) == [
        "rules/__init__.py",
        "rules/digits.py",
        "rules/signs.py",
        "score.py",
        "words.py",
    ]


@pytest.mark.parametrize(
    ("edited", "counts"),
    [("score.py", True), ("words.py", True), ("rules/signs.py", True), ("other.py", False)],
)
def test_an_edit_counts_where_it_is_reached(script: Path, edited: str, counts: bool) -> None:
    """Findings I 5: only the file's own bytes counted."""
    before = script_artifact(script, FIELD).digest
    with (script.parent / edited).open("a", encoding="utf-8") as file:
        file.write("# repaired\n")
    assert (script_artifact(script, FIELD).digest != before) is counts


def test_the_place_does_not_count(script: Path) -> None:
    before = script_artifact(script, FIELD).digest
    moved = script.parent.rename(script.parents[1] / "elsewhere")
    assert script_artifact(moved / "score.py", FIELD).digest == before


def test_a_copy_is_what_was_planned_or_refused(script: Path, tmp_path: Path) -> None:
    artifact = script_artifact(script, FIELD)
    copy_script(artifact, tmp_path / "copy", FIELD)
    assert (tmp_path / "copy" / "rules" / "signs.py").read_text() == "minus = '-'\n"
    assert not (tmp_path / "copy" / "other.py").exists()
    (script.parent / "words.py").write_text("LIST = []\n")
    with pytest.raises(ConfigError, match="was changed while the run began"):
        copy_script(artifact, tmp_path / "copy", FIELD)


def test_modules_of_this_project_are_named(script: Path) -> None:
    with (script.parent / "rules/signs.py").open("a", encoding="utf-8") as file:
        file.write("def g():\n    from engines.rewards.text_rules import exact\n")
    with script.open("a", encoding="utf-8") as file:
        file.write("import infra.nothing_of_this_name\nimport engines.rewards.base as base\n")
    assert project_modules(script) == {"engines.rewards.text_rules", "engines.rewards.base"}
