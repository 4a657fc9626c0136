"""Commits of the hub, with its real client: against a hub on loopback, and against its cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_hub import Hub, serve_hub

from infra import env

PROGRAM = """
import json, sys
from infra.errors import ConfigError
from infra.identity.hub import hub_commit, hub_snapshot
repo_id, revision, verb = json.loads(sys.argv[1])
try:
    if verb == "commit":
        print(hub_commit(repo_id, "model", revision, "model"))
    else:
        files = hub_snapshot(repo_id, "model", revision, "model", ["*.json"])
        print((files / "a.json").read_text())
except ConfigError as error:
    print(error)
"""


class Machine:
    """Processes of one cache of the hub.

    Args:
        cache: directory.
        address: of the hub; None forbids to call any.
    """

    def __init__(self, cache: Path, address: str | None) -> None:
        self._environment = env.child_environment(
            HF_HOME=str(cache), HF_ENDPOINT=address, HF_HUB_OFFLINE=None if address else "1"
        )

    def ask(self, verb: str, revision: str | None = None, repo_id: str = "owner/name") -> str:
        """What a process of its own prints."""
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([repo_id, revision, verb])],
            capture_output=True, text=True, timeout=60, env=self._environment, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


@pytest.fixture
def commits(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
        (directory / "a.json").write_text(directory.name)
        (directory / "a.bin").write_text("a pickle")
    return directories


def push(hub: Hub, directories: list[Path]) -> list[str]:
    return [hub.push("models/owner/name", directory) for directory in directories]


def test_a_job_loads_the_planned_commit_wherever_the_branch_is(
    commits: list[Path], tmp_path: Path
) -> None:
    with serve_hub() as hub:
        machine = Machine(tmp_path / "cache", hub.address)
        first, second = push(hub, commits)
        assert machine.ask("commit") == first
        hub.move("models/owner/name")
        assert machine.ask("files", first) == "first"
        assert machine.ask("commit", "main") == second
        assert machine.ask("commit", first) == first
        assert [kind for kind, _, _ in hub.asked if kind == "info"] == ["info", "info"]
        assert {revision for kind, _, revision in hub.asked if kind != "info"} == {first}
        assert not list((tmp_path / "cache").rglob("*.bin"))
        assert machine.ask("files", "main").startswith("model.revision: got 'main'; need the")
    # The hub is gone: what it said last, and what was downloaded, still count.
    assert machine.ask("commit") == second
    machine = Machine(tmp_path / "cache", None)
    assert machine.ask("files", first) == "first"
    assert machine.ask("files", second).startswith("model.path: owner/name is no path here")


def test_what_cannot_be_resolved_is_one_line_with_its_field(
    commits: list[Path], tmp_path: Path
) -> None:
    with serve_hub() as hub:
        machine = Machine(tmp_path / "cache", hub.address)
        push(hub, commits)
        for field, revision, repo_id, reason in (
            ("revision", "nowhere", "owner/name", "RevisionNotFoundError"),
            ("path", None, "owner/nothing", "RepositoryNotFoundError"),
            ("path", None, "a b/c", "HFValidationError"),
        ):
            said = machine.ask("commit", revision, repo_id)
            assert said.startswith(f"model.{field}: {repo_id} is no path here (cwd is ")
            assert f"(revision {revision or 'main'}): {reason}; check the name" in said
            assert "\n" not in said
    assert "): RevisionResolutionError; check the name" in machine.ask("commit", None)


def test_a_cache_that_the_hubs_own_client_filled(tmp_path: Path) -> None:
    commit = "c" * 40
    root = tmp_path / "cache/hub/models--owner--name"
    (root / "snapshots" / commit).mkdir(parents=True)
    (root / "snapshots" / commit / "a.json").write_text("cached")
    (root / "refs").mkdir()
    (root / "refs/main").write_text(commit)
    machine = Machine(tmp_path / "cache", None)
    assert machine.ask("commit") == commit
    assert machine.ask("files", commit) == "cached"
