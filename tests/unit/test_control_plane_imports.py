"""The control plane starts without the libraries of the data plane: they may not even be there."""

import subprocess
import sys

import pytest

BLOCKED = ("torch", "transformers", "vllm", "sglang", "megatron", "ray", "mlflow", "matplotlib")
CONTROL_PLANE = (
    "flows.commands.cli",
    "flows.rlhf_pipeline",
    "flows.nightly.nightly_recipes",
    "flows.local.local_run",
    "flows.local.local_run",
    "flows.commands.doctor",
    "flows.commands.run",
    "flows.commands.doctor",
    "flows.commands.recipes",
    "flows.commands.show",
    "flows.commands.merge",
    "flows.commands.services",
    "flows.prefect_plugin",
    "tasks.runner.stage",
    "tasks.runner.recorder",
    "engines.config.stages.rl",
    "engines.config.stages.final",
    "engines.config.plugins",
    "engines.errors",
    "engines.training.supported_models",
    "engines.training.backends.options",
)

PROGRAM = """
import importlib.abc, importlib, pkgutil, sys
blocked = {blocked!r}
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{{name}} is not for the control plane")
        return None
sys.meta_path.insert(0, Blocker())
import infra
for module in pkgutil.walk_packages(infra.__path__, "infra."):
    if module.name != "infra.ray.head":
        importlib.import_module(module.name)
for name in {modules!r}:
    importlib.import_module(name)
print(sorted(set(blocked) & set(sys.modules)))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )


def test_the_control_plane_imports_without_the_data_plane() -> None:
    ended = run(PROGRAM.format(blocked=BLOCKED, modules=CONTROL_PLANE))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["engines.jobs.promote", "engines.jobs.preprocess"])
def test_stages_without_a_model_need_no_torch(module: str) -> None:
    blocked = ("torch", "transformers", "ray", "prefect")
    ended = run(PROGRAM.format(blocked=blocked, modules=(module,)))
    assert ended.returncode == 0, ended.stderr


def test_megatron_engine_imports_megatron_only_in_scope() -> None:
    module = "engines.training.backends.megatron.engine"
    ended = run(PROGRAM.format(blocked=("megatron", "mbridge"), modules=(module,)))
    assert ended.returncode == 0, ended.stderr


def test_recipes_are_read_and_planned_without_prefect() -> None:
    blocked = (*BLOCKED, "prefect")
    modules = (
        "flows.commands.cli",
        "flows.recipe.recipe",
        "flows.commands.recipes",
        "flows.commands.run",
    )
    ended = run(PROGRAM.format(blocked=blocked, modules=modules))
    assert ended.returncode == 0, ended.stderr
