import ast
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import env
from infra.errors import ConfigError
from infra.identity import fingerprint
from infra.identity.fingerprint import (
    environment_digest,
    refuse_other_libraries,
    source_closure,
    stage_identity,
)
from infra.store.canonical import sha256_json
from infra.store.stage_spec import Artifact

ROOT = Path(__file__).resolve().parents[4]
BASE: dict[str, Any] = {
    "stage": "sft",
    "schema_version": 1,
    "config": {"lr": 0.1},
    "inputs": {"data": Artifact(kind="dataset", uri="/a", digest="1" * 64)},
    "seed": 0,
    "sources_digest": "s",
    "environment_digest": "e",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `toy` that executes nothing harmless: importing it raises."""
    files = {
        "__init__.py": "raise RuntimeError('imported')",
        "main.py": "import os, toy.a\nfrom toy.sub import leaf, constant\nfrom . import near\n",
        "a.py": "import json",
        "near.py": "from .sub.deep import thing\n",
        "unused.py": "",
        "sub/__init__.py": "from ..late import x",
        "sub/leaf.py": "def f():\n    from toy import lazy\n",
        "sub/deep.py": "thing = 1\n",
        "late.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.unused\n"
        "else:\n    from toy.other import *\n",
        "lazy.py": "try:\n    import toy.optional\nexcept ImportError: pass\n",
        "other.py": "import toy.main\n",
        "optional.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "toy"


def test_known_fingerprint() -> None:
    text = (
        '{"config":{"lr":0.1},"environment":"e","inputs":{"data":"' + "1" * 64 + '"},'
        '"schema_version":1,"seed":0,"sources":"s","stage":"sft"}'
    )
    assert sha256_json(stage_identity(**BASE)) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "rl"},
        {"schema_version": 2},
        {"config": {"lr": 0.2}},
        {"config": {"lr": 0.1, "x": None}},
        {"inputs": {"data": Artifact(kind="dataset", uri="/a", digest="2" * 64)}},
        {"inputs": {"date": BASE["inputs"]["data"]}},
        {"inputs": {}},
        {"seed": 1},
        {"sources_digest": "t"},
        {"environment_digest": "f"},
    ],
)
def test_every_part_counts(change: dict[str, Any]) -> None:
    assert stage_identity(**{**BASE, **change}) != stage_identity(**BASE)


def test_where_an_input_lies_and_who_made_it_do_not_count() -> None:
    moved = Artifact(kind="dataset", uri="/b", digest="1" * 64, fingerprint="9")
    assert stage_identity(**{**BASE, "inputs": {"data": moved}}) == stage_identity(**BASE)


def test_closure_of_a_package_that_cannot_be_imported(package: Path) -> None:
    closure = source_closure(["toy.main"], packages=())
    assert list(closure) == [
        "toy", "toy.a", "toy.late", "toy.lazy", "toy.main", "toy.near", "toy.optional",
        "toy.other", "toy.sub", "toy.sub.deep", "toy.sub.leaf",
    ]  # fmt: skip
    for name, digest in closure.items():
        path = package.parent / (name.replace(".", "/"))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "toy" not in sys.modules


def test_an_edit_changes_the_digest_of_those_who_reach_it_only(package: Path) -> None:
    main, near = source_closure(["toy.main"]), source_closure(["toy.a"])
    (package / "sub/deep.py").write_text("thing = 2\n")
    assert source_closure(["toy.main"]) != main
    assert source_closure(["toy.a"]) == near
    (package / "sub/deep.py").write_text("thing = 1\n")
    assert source_closure(["toy.main"]) == main
    (package / "near.py").write_text("from . import unused\n")
    assert {"toy.unused"} <= set(source_closure(["toy.main"]))


def test_a_plugin_is_followed_into_our_packages(package: Path) -> None:
    (package / "plugin.py").write_text("from infra.errors import ConfigError\nimport json\n")
    assert list(source_closure(["toy.plugin"])) == ["infra", "infra.errors", "toy", "toy.plugin"]


def test_a_plugin_file_counts_by_name_and_content(tmp_path: Path) -> None:
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "reward.py").write_text("from infra import errors\n")
    first = source_closure([str(tmp_path / "x/reward.py")])
    assert list(first) == ["file:reward.py", "infra", "infra.errors"]
    assert source_closure([str(tmp_path / "y/reward.py")]) == first


def test_roots_may_be_single_modules_and_namespace_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "single.py").write_text("import space.inner\n")
    (tmp_path / "space").mkdir()
    (tmp_path / "space/inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(source_closure(["single"])) == ["single"]
    assert list(source_closure(["single", "space.inner"])) == ["single", "space.inner"]


def test_wrong_roots_are_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such module"):
        source_closure(["engines.jobs.no_such_job"])
    with pytest.raises(ConfigError, match="no such module"):
        source_closure(["nowhere_at_all.x"])
    with pytest.raises(ConfigError, match="is no file"):
        source_closure([str(tmp_path / "reward.py")])
    (tmp_path / "reward.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"reward\.py: not Python: "):
        source_closure([str(tmp_path / "reward.py")])


def test_closure_holds_every_module_that_python_itself_loads() -> None:
    program = (
        "import json, sys, infra.store.storage, infra.tracking.journal\n"
        "print(json.dumps(sorted(m for m in sys.modules if m.partition('.')[0] == 'infra')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env=env.child_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    assert list(source_closure(["infra.store.storage", "infra.tracking.journal"])) == json.loads(
        loaded
    )


def test_our_packages_are_all_known() -> None:
    top_level = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert top_level == set(fingerprint.OUR_PACKAGES)


def test_type_checking_blocks_are_recognised_in_both_spellings() -> None:
    code = "if typing.TYPE_CHECKING:\n    import a\nif not x:\n    import b\n"
    nodes = list(fingerprint._executed_nodes(ast.parse(code)))
    assert [n.names[0].name for n in nodes if isinstance(n, ast.Import)] == ["b"]


def test_environment_digest_is_of_versions() -> None:
    import pydantic

    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = (
        f'{{"distributions":{{"no-such-dist":null,"pydantic":"{pydantic.VERSION}"}},'
        f'"python":"{version}"}}'
    )
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert environment_digest(["pydantic", "no-such-dist"]) == expected
    assert environment_digest(["no-such-dist", "pydantic"]) == expected


def test_other_libraries_in_a_job_environment_are_named(tmp_path: Path) -> None:
    """What was planned, what is there instead, and what is there beside it."""
    program = tmp_path / "vllm/bin/python"
    site_packages = tmp_path / "vllm/lib/python3.11/site-packages"
    for name, version in (("vllm", "2"), ("ray", "1"), ("extra", "5")):
        (site_packages / f"{name}.dist-info").mkdir(parents=True)
        text = f"Name: {name}\nVersion: {version}\n"
        (site_packages / f"{name}.dist-info/METADATA").write_text(text)
    refuse_other_libraries({"vllm": "2", "ray": "1", "extra": "5"}, program, "replicas")
    with pytest.raises(ConfigError) as caught:
        refuse_other_libraries({"vllm": "1", "ray": "1", "gone": "3"}, program, "replicas")
    for named in ("replicas would run", "vllm 2 for 1", "gone None for 3", "extra 5 for None"):
        assert named in str(caught.value)
    assert "make env-vllm" in str(caught.value)
    assert "ray" not in str(caught.value)
