"""A user's Python file counts with what it imports from elsewhere."""

import json
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.config.sections import PromoteConfig
from engines.config.stages.final import PromoteStageConfig
from infra.errors import ConfigError
from infra.identity import imported_code as module
from infra.identity.fingerprint import refuse_changed_code
from infra.identity.imported_code import imported_code, script_artifact
from tasks.runner import run as identity
from tasks.runner.run import StageRequest

REWARD = """
import json
import numpy as np
import absent_package
from my_rewards import BONUS
from my_rewards.parts import half
import words
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is installed is found out once per process."""
    caches = (module._by_package, module._is_editable, module._site_directories)
    for each in (*caches, identity.environment_of):
        each.cache_clear()
    yield
    for each in (*caches, identity.environment_of):
        each.cache_clear()
    for name in ("my_rewards", "my_core", "wheeled"):
        assert name not in sys.modules, "nothing is imported"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, and beside it on `sys.path` a package that is edited and one that it imports."""
    files = {
        "user/reward.py": REWARD,
        "user/words.py": "import wheeled\n",
        "site/my_rewards/__init__.py": "BONUS = 1.0\n",
        "site/my_rewards/parts.py": "from my_core import x\nhalf = 0.5\n",
        "site/my_rewards/unused.py": "this is no Python\n",
        "site/my_core.py": "x = 1\n",
        "site/wheeled/__init__.py": "",
        "site/wheeled-2.dist-info/METADATA": "Metadata-Version: 2.1\nName: wheeled\nVersion: 2\n",
        "site/wheeled-2.dist-info/top_level.txt": "wheeled\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed = [*site.getsitepackages(), str(tmp_path / "site/wheeled")]
    monkeypatch.setattr(site, "getsitepackages", lambda: installed)
    return tmp_path


def request(place: Path) -> StageRequest:
    reward = script_artifact(place / "user/reward.py", "rl.reward.function")
    return StageRequest(PromoteStageConfig(promote=PromoteConfig()), {"reward": reward}, 0)


def test_packages_count_by_version_and_edited_ones_by_modules(place: Path) -> None:
    found = imported_code([place / "user/reward.py"])
    assert list(found.sources) == ["my_core", "my_rewards", "my_rewards.parts"]
    assert found.distributions == ("numpy", "wheeled")


@pytest.mark.parametrize(
    "edited",
    ["my_rewards/__init__.py", "my_rewards/parts.py", "my_core.py", "wheeled-2.dist-info/METADATA"],
)
def test_edit_changes_the_stage_and_its_old_job_refuses_it(place: Path, edited: str) -> None:
    before = request(place)
    planned, libraries = before.fingerprint, before.libraries
    path = place / "site" / edited
    path.write_text(
        path.read_text().replace("1.0", "-1.0").replace("Version: 2", "Version: 3") + "\n"
    )
    identity.environment_of.cache_clear()
    assert request(place).fingerprint != planned
    with pytest.raises(ConfigError, match="would run other code"):
        refuse_changed_code(before.sources, libraries)


def test_what_is_not_reached_does_not_count(place: Path) -> None:
    planned = request(place).fingerprint
    (place / "site/my_rewards/unused.py").write_text("")
    assert request(place).fingerprint == planned


def test_an_editable_distribution_counts_by_its_modules(place: Path) -> None:
    """Even where its files lie among the installed ones."""
    url = {"url": "file:///x", "dir_info": {"editable": True}}
    (place / "site/wheeled-2.dist-info/direct_url.json").write_text(json.dumps(url))
    found = imported_code([place / "user/reward.py"])
    assert "wheeled" in found.sources
    assert found.distributions == ("numpy",)
