"""The example plugin as a stranger would have it: installed by pip, or named by the environment.

Its package is built from a copy, installed beside the project's environment, and looked at from
processes of their own: `rlhf doctor` and `rlhf plan`, the contract tests, an engine that trains.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra import env

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "plugin_example"
GUIDE = ROOT / "docs" / "guides" / "add-a-platform.md"
VARIABLE = "RLHF_USE_EXTERNAL_MODULES"
REGISTERING = "example_chip.register"
TRAINING = """
import json, sys
from pathlib import Path
import torch
from rlhf.testing.context import OPTIMIZER, train
from engines.config.training import TrainingConfig
from engines.training.base import create_engine
from hardware.detection import detect
from infra.errors import ConfigError
root, backend = Path(sys.argv[1]), sys.argv[2]
platform, reason = detect("auto")
try:
    engine = create_engine(
        "language_model", root / "qwen3", TrainingConfig(backend=backend), OPTIMIZER, 100,
        platform, seed=0,
    )
    engine.initialize()
    steps = [row[:2] for row in train(engine)]
    print(json.dumps({"vendor": platform.vendor_name, "reason": reason, "steps": steps}))
except ConfigError as error:
    print(json.dumps({"error": str(error)}))
"""


def copy_source(
    into: Path, distribution: str = "rlhf-example-chip", version: str = "1.0.0"
) -> Path:
    """The package's source, under another name or version."""
    source = into / f"{distribution}-{version}"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    project = source / "pyproject.toml"
    text = project.read_text()
    assert 'name = "rlhf-example-chip"\nversion = "1.0.0"' in text
    project.write_text(
        text.replace(
            'name = "rlhf-example-chip"\nversion = "1.0.0"',
            f'name = "{distribution}"\nversion = "{version}"',
        )
    )
    return source


def pip_install(source: Path, site: Path) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
            "--no-build-isolation", "--disable-pip-version-check", "--upgrade",
            "--target", str(site), str(source),
        ],
        check=True, timeout=300,
    )  # fmt: skip


def run(arguments: list[str], path: Path, **variables: str | None) -> subprocess.CompletedProcess:
    """A Python process that finds the plugin under `path`."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=900, check=False, cwd=path,
        env=env.child_environment(
            **{
                "PYTHONPATH": str(path), "RLHF_PLATFORM": None, VARIABLE: None,
                "OMP_NUM_THREADS": "1", **variables,
            }
        ),
    )  # fmt: skip


def doctor(path: Path, home: Path, **variables: str | None) -> dict[str, tuple[str, str]]:
    """Status and detail by name of the check."""
    ended = run(
        ["-m", "flows.commands.cli", "doctor", "--json"], path, RLHF_HOME=str(home), **variables
    )
    return {
        row["name"]: (row["status"], row["detail"]) for row in json.loads(ended.stdout)["checks"]
    }


def trained(path: Path, models: Path, backend: str, **variables: str | None) -> dict:
    ended = run(["-c", TRAINING, str(models), backend], path, **variables)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def first_fingerprint(path: Path, home: Path) -> str:
    """Of the first stage of a plan with the plugin's preprocessor, platform and engine."""
    cards = home.with_name("cards.jsonl")
    cards.write_text("".join(f'{{"front": "q{i}", "back": "{i}"}}\n' for i in range(9)))
    rows = json.dumps([{"format": "flashcards", "path": str(cards)}])
    ended = run(
        [
            "-m", "flows.commands.cli", "plan", "quickstart", "--json",
            "--set", "training.backend=example_engine",
            "--set", "hardware.platform=example_chip",
            "--set", "data.arithmetic=null", "--set", f"data.sft={rows}",
            "--set", f"data.rl={rows}", "--set", f"data.evaluation={rows}",
        ],
        path, RLHF_HOME=str(home),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    return (plan["stages"] if isinstance(plan, dict) else plan)[0]["fingerprint"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package."""
    root = tmp_path_factory.mktemp("plugin")
    pip_install(copy_source(root), root / "site")
    return root / "site"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf.testing.tiny_models import write_tiny_models

    root = tmp_path_factory.mktemp("models")
    write_tiny_models(root)
    return root


def test_the_doctor_lists_it(site: Path, tmp_path: Path) -> None:
    found = doctor(site, tmp_path)
    source = "rlhf-example-chip==1.0.0, example_chip"
    assert found["plugin platform.example_chip"] == (
        "ok",
        f"{source}.platform:ExampleChipPlatform, available: the CPU, pretending to be an example "
        "chip",
    )
    assert found["plugin backend.example_engine"] == ("ok", f"{source}.engine:ExampleEngine")
    assert found["platform"][1].startswith("cpu Example Chip 1 (example_chip: the CPU, pretending")
    assert not [name for name, (status, _) in found.items() if status == "error"]


@pytest.mark.parametrize(
    "tests",
    [
        ["rlhf.testing.test_platform"],
        [  # Two ranks: `test_the_guide_to_a_backend`.
            "rlhf.testing.test_backend",
            "--backend=example_engine",
            "--claims=value_model,lora",
            "-k=alone",
        ],
        ["rlhf.testing.test_algorithm", "-k=example"],
        [  # The guide to a rollout engine runs all of it.
            "rlhf.testing.test_rollout_requests",
            "--engine=example_rollout",
        ],
        [
            "rlhf.testing.test_tracker",
            "--tracker=example_tracker",
            "--tracker-reader=example_chip.tracker:read_run",
        ],
    ],
    ids=["platform", "engine", "algorithm", "rollout", "tracker"],
)
def test_it_keeps_the_contracts(site: Path, tests: list[str]) -> None:
    ended = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
         "--pyargs", *tests, "--platform=example_chip"],
        site,
    )  # fmt: skip
    last = ended.stdout.strip().splitlines()[-1]
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in last
    assert "skipped" not in last


def test_it_trains_as_another_backend_does(site: Path, models: Path) -> None:
    example = trained(site, models, "example_engine")
    assert example["vendor"] == "example"
    assert example["reason"].startswith("example_chip: the CPU, pretending")
    reference = trained(site, models, "fsdp2", RLHF_PLATFORM="cpu")
    assert reference["vendor"] == "cpu"
    for ours, theirs in zip(example["steps"], reference["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_environment_names_it_without_an_installation(
    tmp_path: Path, models: Path, site: Path
) -> None:
    source = copy_source(tmp_path)
    assert "plugin platform.example_chip" not in doctor(source, tmp_path / "home")
    found = doctor(source, tmp_path / "home", **{VARIABLE: REGISTERING})
    assert found[f"module {REGISTERING}"] == ("ok", f"imported for {VARIABLE}")
    assert found["plugin platform.example_chip"][1].startswith(
        "registered at run time, example_chip.platform:ExampleChipPlatform, available"
    )
    assert found["plugin backend.example_engine"][0] == "ok"
    steps = trained(source, models, "example_engine", **{VARIABLE: REGISTERING})["steps"]
    assert steps == trained(site, models, "example_engine")["steps"]
    # Installed and named: one plugin, not two.
    both = doctor(site, tmp_path / "home", **{VARIABLE: REGISTERING})
    assert both["plugin platform.example_chip"][1].startswith("rlhf-example-chip==1.0.0")
    assert not [name for name, (status, _) in both.items() if status == "error"]


def test_another_version_is_another_fingerprint(site: Path, tmp_path: Path) -> None:
    other, moved = tmp_path / "other", tmp_path / "moved"
    pip_install(copy_source(tmp_path, version="1.0.1"), other)
    shutil.copytree(site, moved)
    of_site, of_other, of_moved = (
        first_fingerprint(place, tmp_path / "home") for place in (site, other, moved)
    )
    assert of_site != of_other
    assert of_site == of_moved


def test_a_broken_version_stops_only_who_asks_for_it(tmp_path: Path, models: Path) -> None:
    source = copy_source(tmp_path)
    engine = source / "example_chip" / "engine.py"
    engine.write_text("raise RuntimeError('built for\\nanother torch')\n")
    site = tmp_path / "site"
    pip_install(source, site)
    line = (
        "example_engine cannot be loaded from example_chip.engine:ExampleEngine (RuntimeError: "
        "built for another torch); repair or remove rlhf-example-chip==1.0.0"
    )
    assert trained(site, models, "example_engine")["error"] == f"training.backend: {line}"
    assert trained(site, models, "fsdp2")["vendor"] == "example"
    found = doctor(site, tmp_path / "home")
    assert found["plugin backend.example_engine"] == ("error", line)
    broken = {name for name, (status, _) in found.items() if status == "error"}
    assert broken == {"plugin backend.example_engine", "plugin backend.example_engine.value_model"}


def test_broken_plugin_module_fails_only_runs_that_request_it(tmp_path: Path, models: Path) -> None:
    source = copy_source(tmp_path)
    (source / "broken_registration.py").write_text("raise OSError('libchip.so:\\n missing')\n")
    listed = {VARIABLE: f"broken_registration,{REGISTERING}"}
    example = trained(source, models, "example_engine", **listed)
    assert example["vendor"] == "example"
    line = "broken_registration registers: OSError: libchip.so: missing"
    assert line in example["reason"]
    fsdp2 = trained(source, models, "fsdp2", RLHF_PLATFORM="cpu", **listed)
    assert fsdp2["vendor"] == "cpu"
    refused = trained(source, models, "of_the_broken_one", **listed)["error"]
    assert "no 'of_the_broken_one'; known: " in refused
    assert "broken_registration cannot be imported (OSError: libchip.so: missing)" in refused
    found = doctor(source, tmp_path / "home", **listed)
    broken = {name for name, (status, _) in found.items() if status == "error"}
    assert broken == {"module broken_registration"}


def test_two_of_one_name_are_refused(tmp_path: Path, models: Path) -> None:
    site = tmp_path / "site"
    pip_install(copy_source(tmp_path), site)
    other = copy_source(tmp_path, distribution="rlhf-other-chip")
    (other / "example_chip").rename(other / "other_chip")
    for file in (other / "pyproject.toml", *(other / "other_chip").glob("*.py")):
        text = file.read_text().replace("example_chip.", "other_chip.")
        file.write_text(text.replace('packages = ["example_chip"]', 'packages = ["other_chip"]'))
    pip_install(other, site)
    both = "is registered by both rlhf-example-chip==1.0.0 and rlhf-other-chip==1.0.0"
    found = doctor(site, tmp_path / "home")
    for name in ("platform.example_chip", "backend.example_engine"):
        status, detail = found[f"plugin {name}"]
        assert (status, both in detail) == ("error", True), found[f"plugin {name}"]
    assert found["platform"][0] == "error"  # `auto` cannot know which one is meant
    refused = trained(site, models, "example_engine", RLHF_PLATFORM="cpu")["error"]
    assert refused == f"training.backend: 'example_engine' {both}; remove one"
    assert trained(site, models, "fsdp2", RLHF_PLATFORM="cpu")["vendor"] == "cpu"


def test_the_guide_is_followed_to_the_letter(tmp_path: Path) -> None:
    """On a machine without the chip of the guide, which is every machine."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    project = next(body for language, body in blocks if language == "toml")
    platform, register = (body for language, body in blocks if language == "python")
    printed = next(body for _, body in blocks if body.startswith("ok    plugin platform.acme"))
    package = tmp_path / "acme_platform" / "acme_platform"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(project)
    (package / "platform.py").write_text(platform)
    (package / "__init__.py").touch()
    site = tmp_path / "site"
    pip_install(package.parent, site)
    status, detail = doctor(site, tmp_path / "home")["plugin platform.acme"]
    assert f"{status}    plugin platform.acme   {detail}\n" == printed
    ended = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "--pyargs",
         "rlhf.testing.test_platform", "--platform=acme"],
        site,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"^\d+ skipped in ", ended.stdout.splitlines()[-1])
    assert "needs a machine with acme: torch_acme is not installed" in ended.stdout
    ended = run(
        ["-m", "flows.commands.cli", "run", "quickstart", "--set", "hardware.platform=acme"],
        site, RLHF_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert ended.returncode == 2
    assert "acme was asked for and is not available (torch_acme is not installed)" in ended.stderr
    # Without the installation.
    assert register.startswith("# acme_platform/register.py\n")
    (package / "register.py").write_text(register)
    shutil.rmtree(package.parent / "build", ignore_errors=True)
    for left_by_pip in package.parent.glob("*.egg-info"):
        shutil.rmtree(left_by_pip)
    found = doctor(package.parent, tmp_path / "home", **{VARIABLE: "acme_platform.register"})
    assert found["module acme_platform.register"] == ("ok", f"imported for {VARIABLE}")
    assert found["plugin platform.acme"][1].endswith("not available: torch_acme is not installed")
