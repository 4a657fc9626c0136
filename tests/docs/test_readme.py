"""What the README and the guides say can be typed, linked and loaded."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.recipe.recipe import load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHELL_BLOCKS = [text for language, text in BLOCKS if not language]


def command_lines() -> list[str]:
    """Every command of the README's plain blocks, comments removed."""
    lines = [line.split("#")[0].strip() for block in SHELL_BLOCKS for line in block.splitlines()]
    return [line for line in lines if re.match(r"(make|rlhf|prefect) ", line)]


def test_the_readme_has_its_two_commands() -> None:
    assert command_lines()[:2] == ["make quickstart", "make test"]


@pytest.mark.parametrize(
    "line", [line for line in command_lines() if line.startswith("make ")], ids=str
)
def test_make_targets_exist(line: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *line.split()[1:]], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "line", [line for line in command_lines() if line.startswith("rlhf ")], ids=str
)
def test_rlhf_commands_parse(line: str) -> None:
    command = line.split()[1]
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", command, "--help"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0
    for option in re.findall(r" (--\w+)", line):
        assert option in done.stdout.decode()


def test_the_plan_command_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    line = next(line for line in command_lines() if line.startswith("rlhf plan"))
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", *line.split()[1:]],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "preprocess" in done.stdout.decode()


def test_the_readme_recipe_is_valid() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parse_recipe(yaml.safe_load(text)).rl.group_size == 8


@pytest.mark.parametrize(
    "path", sorted((ROOT / "flows" / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert load_recipe(path.stem).name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_reference_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


def test_no_sentence_of_the_readme_is_long() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    paragraphs = re.split(r"\n\s*\n|\n(?=[*|#!])", prose)
    texts = [" ".join(text.split()) for text in paragraphs]
    sentences = [s for text in texts for s in re.split(r"(?<=[.:;?])\s", text)]
    assert [s for s in sentences if len(s.split()) > 40] == []
