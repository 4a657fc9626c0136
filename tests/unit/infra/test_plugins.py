"""Who announces what: both ways, at once, broken, and twice."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.config.algorithm import AlgorithmConfig
from engines.config.backends import ENGINES
from engines.config.options import check_parts
from engines.config.plugins import REWARDS, ROLLOUT_ENGINES, named_rows, register_plugin
from engines.config.rows import ADVANTAGES
from hardware.detection import create, detect, names
from infra.errors import EXIT_TERMINATED, ConfigError
from infra.identity.fingerprint import environment_digest, outside_code
from infra.plugins import (
    Row,
    external_modules,
    import_external_modules,
    load_row,
    outside_rows,
)
from tasks.runner.run import environment_of

VARIABLE = "RLHF_USE_EXTERNAL_MODULES"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    monkeypatch.setattr("infra.plugins._broken", {})
    monkeypatch.syspath_prepend(str(tmp_path))


def install(site: Path, distribution: str, version: str = "1.0", **entries: str) -> None:
    """What pip leaves of a wheel that announces plugins."""
    for old in site.glob(f"{distribution}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir()
    lines = "".join(f"{name.replace('__', '.')} = {target}\n" for name, target in entries.items())
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[rlhf.plugins]\n{lines}")


def test_entry_points_are_listed_by_name_with_their_owner(tmp_path: Path) -> None:
    install(tmp_path, "wheel_b", reward__zeta="b:z", platform__chip="b:Chip")
    install(tmp_path, "wheel_a", reward__alpha="a.deep:f")
    assert outside_rows() == (
        ("platform", Row(name="chip", target="b:Chip", owner="wheel_b==1.0")),
        ("reward", Row(name="alpha", target="a.deep:f", owner="wheel_a==1.0")),
        ("reward", Row(name="zeta", target="b:z", owner="wheel_b==1.0")),
    )
    assert [row.module for row in REWARDS.outside()] == ["a.deep", "b"]


def test_modules_of_the_variable_register_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all_kinds_module.py").write_text(
        "from engines.config.plugins import register_plugin\n"
        "register_plugin('platform', 'late_chip', 'hardware.cpu:CPUPlatform')\n"
        "register_plugin('backend', 'late', 'late.engine:E', devices=['cpu'])\n"
        "register_plugin('backend', 'late.value_model', 'late.engine:V')\n"
        "register_plugin('reward', 'late', 'late.reward:score')\n"
    )
    monkeypatch.setenv(VARIABLE, " all_kinds_module ,")
    assert list(external_modules()) == ["all_kinds_module"]
    assert ENGINES.find("late").registrar == "all_kinds_module"
    assert REWARDS.find("late").target == "late.reward:score"
    assert "late_chip" in names()
    with pytest.raises(ConfigError, match="known: .*late.*; did you mean late"):
        ENGINES.find("lat")
    kinds = [f"{kind}.{row.name}" for kind, row in outside_rows()]
    assert kinds == [
        "platform.late_chip",
        "backend.late",
        "backend.late.value_model",
        "reward.late",
    ]


def test_the_same_plugin_by_both_ways_is_one(tmp_path: Path) -> None:
    install(tmp_path, "wheel_a", rollout__mine="mine.engine:E")
    for _ in range(2):
        register_plugin("rollout", "mine", "mine.engine:E")
    assert [row.owner for row in ROLLOUT_ENGINES.outside()] == ["wheel_a==1.0"]
    assert ROLLOUT_ENGINES.find("mine").owner == "wheel_a==1.0"


def test_a_taken_name_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    install(tmp_path, "wheel_a", rollout__mine="mine.engine:E")
    register_plugin("rollout", "mine", "other:E")
    with pytest.raises(ConfigError) as caught:
        ROLLOUT_ENGINES.find("mine")
    assert str(caught.value) == (
        "rollout.engine: 'mine' is registered by both wheel_a==1.0 and other:E (registered at run "
        "time); remove one"
    )
    assert ROLLOUT_ENGINES.find("transformers").is_ours
    with pytest.raises(ConfigError, match="got target 'x.Y'; need module:attribute"):
        register_plugin("reward", "mine", "x.Y")


def test_two_platforms_of_one_name_are_refused_on_request() -> None:
    register_plugin("platform", "chip", "a:B")
    register_plugin("platform", "chip", "c:D")
    with pytest.raises(ConfigError, match=r"both a:B \(registered at run time\) and c:D"):
        create("chip")
    assert create("cpu").device_name == "cpu"
    register_plugin("platform", "cpu", "c:D")
    with pytest.raises(ConfigError, match="'cpu' is registered by both this project and c:D"):
        create("cpu")


@pytest.mark.parametrize("devices", [[], ["chip", "cpu"]])
def test_a_backend_of_this_project_has_one_owner(devices: list[str]) -> None:
    register_plugin("backend", "fsdp2", "x:Y", devices=devices)
    with pytest.raises(ConfigError, match="'fsdp2' is registered by both this project and x:Y"):
        ENGINES.find("fsdp2")
    assert ENGINES.find("fsdp").is_ours


def test_an_engine_for_values_is_refused_by_itself() -> None:
    for name in ("fsdp2.value_model", "torchtitan.value_model"):
        register_plugin("backend", name, "builtins:dict")
    assert ENGINES.find("fsdp2").is_ours
    with pytest.raises(ConfigError, match="'fsdp2.value_model' is registered by both this project"):
        ENGINES.find("fsdp2.value_model", device="cpu")
    # This project has none, so there is no second owner.
    assert ENGINES.load("torchtitan.value_model", device="cpu") is dict


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"kind": "reward", "devices": ["cpu"]}, "got devices; only a backend has them"),
        ({"kind": "backend", "vendor": "acme"}, "got vendor 'acme' without devices"),
    ],
)
def test_a_place_that_nobody_looks_at_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"plugin {arguments['kind']}.mine: {problem}"):
        register_plugin(name="mine", target="x:Y", **arguments)


def test_the_order_of_devices_does_not_matter() -> None:
    register_plugin("backend", "mine", "x:Y", devices=["cpu", "cuda"])
    register_plugin("backend", "mine", "x:Y", devices=["cuda", "cpu", "cuda"])
    assert ENGINES.find("mine").devices == ("cpu", "cuda")


@pytest.mark.parametrize("name", ["mine", "grpo"])
def test_an_algorithm_part_has_one_owner(name: str, tmp_path: Path) -> None:
    for module in ("alg_a", "alg_b") if name == "mine" else ("alg_a",):
        (tmp_path / f"{module}.py").write_text("def part(inputs): ...\n")
        register_plugin("adv_estimator", name, f"{module}:part")
    algorithm = AlgorithmConfig(adv_estimator=name)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"'{name}' is registered by both .*alg_a:part"):
            check_parts(algorithm)
    with pytest.raises(ConfigError, match=f"'{name}' is registered by both .*alg_a:part"):
        ADVANTAGES.load(name)


def test_an_engine_of_one_device_may_join_a_backend_that_exists() -> None:
    register_plugin("backend", "fsdp2", "chip.engine:E", devices=["chip"], vendor="me")
    register_plugin("backend", "fsdp2", "chip.engine:F", devices=["cuda"], vendor="me")
    assert ENGINES.find("fsdp2").is_ours
    register_plugin("backend", "fsdp2", "other:E", devices=["tpu", "chip"], vendor="me")
    with pytest.raises(ConfigError, match="registered by both chip.engine:E .* and other:E"):
        ENGINES.find("fsdp2")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library_at_all", "ModuleNotFoundError: No module named"),
        ("raise SystemError('first line\\nsecond line')", "SystemError: first line second line"),
        ("def broken(:", "SyntaxError: "),
        ("import sys\nsys.exit('no licence')", "it calls sys.exit('no licence')"),
    ],
)
def test_failing_module_import_costs_one_line_and_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    (tmp_path / "bad_external.py").write_text(source)
    (tmp_path / "good_external.py").write_text(
        "from engines.config.plugins import register_plugin\n"
        "register_plugin('rollout', 'good', 'json:loads')\n"
    )
    monkeypatch.delitem(sys.modules, "good_external", raising=False)
    monkeypatch.setenv(VARIABLE, "bad_external,good_external,bad_external")
    line = f"environment.{VARIABLE}: bad_external cannot be imported ({reason}"
    (broken,) = import_external_modules()
    assert str(broken).startswith(line)
    assert str(broken).endswith("repair or install it, or remove it from the list")
    assert "\n" not in str(broken)
    assert ROLLOUT_ENGINES.load("good") is json.loads
    assert ENGINES.find("fsdp2").is_ours
    assert detect("cpu")[0].device_name == "cpu"
    with pytest.raises(
        ConfigError, match="rollout.engine: no 'goood'; known: .*mean good"
    ) as caught:
        ROLLOUT_ENGINES.load("goood")
    assert str(caught.value).endswith(f"; {broken}")


def test_a_signal_during_an_import_is_not_the_modules_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(f"raise SystemExit({EXIT_TERMINATED})\n")
    monkeypatch.setenv(VARIABLE, "slow_module")
    with pytest.raises(SystemExit):
        import_external_modules()


def test_auto_says_what_it_could_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chip_module.py").write_text("raise OSError('libchip.so is missing')\n")
    monkeypatch.setenv(VARIABLE, "chip_module")
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    why_not = "not what chip_module registers: OSError: libchip.so is missing"
    assert why_not in detect("auto")[1]
    with pytest.raises(ConfigError, match="no 'chip'; known: .*chip_module cannot be imported"):
        detect("chip")


def test_secrets_in_a_reason_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaking_module.py").write_text(
        "import os\nraise OSError(os.environ['MY_CHIP_TOKEN'])\n"
    )
    monkeypatch.setenv("MY_CHIP_TOKEN", "correct-horse-battery")
    monkeypatch.setenv(VARIABLE, "leaking_module")
    assert [broken.reason for broken in import_external_modules()] == ["OSError: ***"]


def test_a_plugin_that_does_not_load_names_its_distribution(tmp_path: Path) -> None:
    install(tmp_path, "wheel_a", reward__gone="gone_module:f", reward__less="colorsys:nothing")
    gone, less = REWARDS.outside()
    with pytest.raises(ConfigError) as caught:
        load_row(gone, "rl.reward.function")
    assert str(caught.value) == (
        "rl.reward.function: gone cannot be loaded from gone_module:f (ModuleNotFoundError: No "
        "module named 'gone_module'); repair or remove wheel_a==1.0"
    )
    install(tmp_path, "wheel_b", rollout__gone="gone_module:f")
    with pytest.raises(ConfigError, match="rollout.engine: gone cannot .* remove wheel_b==1.0"):
        ROLLOUT_ENGINES.load("gone")
    with pytest.raises(ConfigError, match="less cannot be loaded .*AttributeError.*wheel_a==1.0"):
        load_row(less, "rl.reward.function")


def test_a_module_may_look_plugins_up_while_it_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looking_module.py").write_text(
        "from infra.plugins import Row, outside_rows, register_row\n"
        "seen = outside_rows()\n"
        "register_row('platform', Row(name='looking', target='a:B'))\n"
    )
    monkeypatch.setenv(VARIABLE, "looking_module")
    assert [row.name for _, row in outside_rows()] == ["looking"]


def test_plugins_enter_the_environment_of_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = environment_digest(["numpy"])
    assert outside_code() == {}
    assert environment_digest(["numpy"], outside_code()) == alone
    (tmp_path / "engine_of_a.py").write_text("import part_of_a\nx = 1\n")
    (tmp_path / "part_of_a.py").write_text("y = 1\n")
    install(tmp_path, "wheel_a", backend__mine="engine_of_a:E", reward__gone="gone_module:f")

    def outside() -> dict[str, Any]:
        return outside_code(named_rows([("backend", "mine"), ("reward", "gone"), ("rollout", "b")]))

    digests = [environment_digest(["numpy"], outside())]
    install(tmp_path, "wheel_a", "1.1", backend__mine="engine_of_a:E", reward__gone="gone_module:f")
    digests.append(environment_digest(["numpy"], outside()))
    (tmp_path / "engine_of_a.py").write_text("import part_of_a\nx = 2\n")
    digests.append(environment_digest(["numpy"], outside()))
    (tmp_path / "registering_of_b.py").write_text(
        "from infra.plugins import Row, register_row\n"
        "register_row('rollout', Row(name='b', target='engine_of_b:E'))\n"
    )
    (tmp_path / "engine_of_b.py").write_text("z = 1\n")
    monkeypatch.setenv(VARIABLE, "registering_of_b")
    digests.append(environment_digest(["numpy"], outside()))
    (tmp_path / "engine_of_b.py").write_text("z = 2\n")
    digests.append(environment_digest(["numpy"], outside()))
    (tmp_path / "registering_of_b.py").write_text("# nothing any more\n")
    digests.append(environment_digest(["numpy"], outside()))
    assert len({alone, *digests}) == 7
    assert environment_digest(["numpy"], outside()) == digests[-1]
    (tmp_path / "part_of_nobody.py").write_text("z = 2\n")
    assert environment_digest(["numpy"], outside()) == digests[-1]


def test_listed_module_counts_only_for_stages_naming_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_c.py").write_text(
        "from infra.plugins import Row, register_row\n"
        "register_row('rollout', Row(name='c', target='engine_of_c:E'))\n"
    )
    (tmp_path / "engine_of_c.py").write_text("z = 1\n")
    monkeypatch.setenv(VARIABLE, "module_of_c")
    assert outside_code(named_rows([("rollout", "transformers")])) == {}
    assert list(outside_code(named_rows([("rollout", "c")]))["sources"]) == [
        "engine_of_c",
        "module_of_c",
    ]
    (tmp_path / "patch_of_d.py").write_text("# changes a library\n")
    monkeypatch.setenv(VARIABLE, "module_of_c,patch_of_d")
    assert list(outside_code()["sources"]) == ["patch_of_d"]


def test_a_repaired_module_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patching_module.py").write_text("import library_of_patch\n")
    monkeypatch.setenv(VARIABLE, "patching_module")
    without = outside_code()
    monkeypatch.setattr("infra.plugins._broken", {})  # as in the next process
    (tmp_path / "library_of_patch.py").touch()
    importlib.invalidate_caches()
    repaired = outside_code()
    assert import_external_modules() == ()
    assert repaired["sources"] == without["sources"]
    assert environment_digest([], repaired) != environment_digest([], without)


def test_plugin_version_changes_only_stages_that_name_it(tmp_path: Path) -> None:
    def environments() -> tuple[str, str]:
        environment_of.cache_clear()
        return environment_of(frozenset({("platform", "mine")}), None), environment_of(
            frozenset(), None
        )

    found = []
    for version in ("1.0", "1.1", "1.0"):
        install(tmp_path, "wheel_a", version, platform__mine="json:loads")
        found.append(environments())
    naming, others = zip(*found, strict=True)
    assert naming[0] == naming[2] != naming[1]
    assert len(set(others)) == 1


def test_listing_imports_no_plugin(tmp_path: Path) -> None:
    install(tmp_path, "wheel_a", platform__chip="never_import_me:Chip")
    (tmp_path / "never_import_me.py").write_text("raise SystemExit('imported')\n")
    program = (
        "from infra.plugins import outside_rows; from engines.config.plugins import TABLES\n"
        "print(outside_rows()[0][1].name)\n"
        "TABLES['backend'].find('fsdp2'); import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["chip", "False"]


def test_places_collide_by_device_and_vendor() -> None:
    def engine(*devices: str, vendor: str | None = None) -> Row:
        return Row(name="b", target="x:Y", owner="o", devices=devices, vendor=vendor)

    assert engine().collides_with(engine())
    assert engine("cpu", "cuda").collides_with(engine("cuda"))
    assert not engine("cpu").collides_with(engine("cuda"))
    assert not engine("cuda").collides_with(engine())
    assert not engine("cuda", vendor="a").collides_with(engine("cuda"))
