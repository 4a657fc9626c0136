import ast
from pathlib import Path

import pytest

from infra import env
from infra.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")


def reads_environment(source: str) -> bool:
    """Whether code touches the process environment through `os`, under any spelling."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    modules = {alias.asname or alias.name for alias in imported if alias.name == "os"}
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in names]
    from_os = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "os"]
    return any(isinstance(n.value, ast.Name) and n.value.id in modules for n in attributes) or any(
        alias.name in names for n in from_os for alias in n.names
    )


def test_only_env_touches_the_environment() -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path != ROOT / "infra/env.py" and reads_environment(path.read_text(encoding="utf-8"))
    ]
    assert not offenders


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"],
)
def test_the_check_above_sees_every_spelling(source: str) -> None:
    assert reads_environment(source)


def test_get_prefers_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", "/somewhere")
    assert env.RLHF_HOME.get() == "/somewhere"
    monkeypatch.setenv("RLHF_HOME", "")
    assert env.RLHF_HOME.get() == ".rlhf"
    monkeypatch.delenv("RLHF_HOME")
    assert env.RLHF_HOME.get() == ".rlhf"


def test_require_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"^environment\.RAY_ADDRESS: not set; need .*export it$"):
        env.RAY_ADDRESS.require()


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in {"1": True, "Yes": True, "0": False, "off": False, "": False}.items():
        monkeypatch.setenv("RLHF_DEBUG", text)
        assert env.RLHF_DEBUG.get_bool() is expected
    monkeypatch.setenv("RLHF_DEBUG", "perhaps")
    with pytest.raises(ConfigError, match="need 1 or 0"):
        env.RLHF_DEBUG.get_bool()


def test_home_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_HOME", raising=False)
    assert env.home() == tmp_path / ".rlhf"
    assert not env.home().exists()
    monkeypatch.setenv("RLHF_HOME", "~/x")
    assert env.home() == Path.home() / "x"


def test_child_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("RAY_ADDRESS", "http://h:1")
    child = env.child_environment(RLHF_PLATFORM="cpu", RAY_ADDRESS=None)
    assert (child["KEPT"], child["RLHF_PLATFORM"], "RAY_ADDRESS" in child) == ("1", "cpu", False)
    child["KEPT"] = "2"
    assert env.child_environment()["KEPT"] == "1"
    assert env.RAY_ADDRESS.get() == "http://h:1"


def test_set_for_process_knows_only_declared_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    env.set_for_process("DO_NOT_TRACK", "false")
    assert env.DO_NOT_TRACK.get() == "false"
    env.set_for_process("DO_NOT_TRACK", None)
    assert env.DO_NOT_TRACK.get() is None
    with pytest.raises(KeyError, match="add its line"):
        env.set_for_process("SOMETHING_ELSE", "1")


def test_every_variable_is_declared_once_and_described() -> None:
    variables = env.all_variables()
    assert len({v.name for v in variables}) == len(variables) >= 20
    assert all(v.description and "\n" not in v.description for v in variables)
    assert [name for name in dir(env) if isinstance(getattr(env, name), env.EnvVar)] == sorted(
        v.name for v in variables
    )
    with pytest.raises(ValueError, match="declared twice"):
        env.EnvVar("RLHF_HOME", None, "again")
