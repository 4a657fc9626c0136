"""What a job's processes know of the process that submitted it."""

from pathlib import Path

import pytest

from infra import env
from tasks.runner.submission import forwarded_environment


@pytest.mark.parametrize("named", [None, "home"])
def test_the_home_is_one_place_for_every_process(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job, its ranks and its replicas have working directories of their own."""
    if named is None:
        monkeypatch.delenv(env.RLHF_HOME.name, raising=False)
    else:
        monkeypatch.setenv(env.RLHF_HOME.name, str(tmp_path / named))
    monkeypatch.chdir(tmp_path)
    told = forwarded_environment()[env.RLHF_HOME.name]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv(env.RLHF_HOME.name, told)
    assert env.home() == tmp_path / (named or ".rlhf")
