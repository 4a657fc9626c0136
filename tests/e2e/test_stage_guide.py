"""The guide to a stage, followed to the letter in a copy of the project."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_pipeline import Home

from engines.config.stages import PreprocessStageConfig
from flows.recipe.recipe import load_recipe
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "add-a-stage.md"
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")


def insert(path: Path, below: str, text: str) -> None:
    """Add lines below the one line that begins like this."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.strip().startswith(below)]
    lines[place + 1 : place + 1] = text.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def follow_the_guide(project: Path) -> None:
    """Its blocks where it says, and the imports that they need."""
    blocks = re.findall(r"^ {3}```python\n(.*?)^ {3}```", GUIDE.read_text(), re.M | re.S)
    declaration, job, task, field, line = (textwrap.dedent(block) for block in blocks)
    with (project / "engines/config/stages.py").open("a") as file:
        file.write(f"\n\n{declaration}")
    (project / "engines/jobs/count.py").write_text(job)
    with (project / "tasks/stages.py").open("a") as file:
        file.write(f"\n\n{task}")
    imports = "from engines.config.stages import CountConfig, CountStageConfig"
    recipe, flow = project / "flows/recipe/recipe.py", project / "flows/stage_order.py"
    insert(recipe, "data: DataConfig", textwrap.indent(field, " " * 4))
    insert(flow, "data = preprocess(", textwrap.indent(line, " " * 4))
    insert(flow, "from tasks.stages", f"{imports}\nfrom tasks.stages import count")
    insert(recipe, "from pathlib import Path", imports)
    insert(project / "tasks/stages.py", "from infra.store", imports)


def test_a_stage_is_one_file_one_field_and_one_line(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for package in PACKAGES:
        unread = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, project / package, ignore=unread)
    follow_the_guide(project)
    home = Home(tmp_path / "home")
    environment = {**home.environment, "PYTHONPATH": str(project)}

    def plan(*overrides: str) -> list[str]:
        ended = subprocess.run(
            home.command("plan", "--json", *overrides),
            cwd=project, capture_output=True, text=True, env=environment, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return [stage["label"] for stage in json.loads(ended.stdout)["stages"]]

    assert plan()[:3] == ["preprocess", "count", "sft"]
    storage = open_storage(str(tmp_path / "store"))

    def run(stage: str, config: dict, **inputs: Artifact) -> CommitRecord:
        spec = StageSpec(
            stage=stage, job_module=f"engines.jobs.{stage}", fingerprint=stage, attempt=0,
            holder="test", config=config, inputs=inputs, seed=0, store_uri=storage.uri,
        )  # fmt: skip
        storage.attempts.hold(stage, Holder(id="test", process="test"), 0)
        storage.channel(stage).write_specification(spec)
        ended = subprocess.run(
            [sys.executable, *spec.job_argv],
            cwd=project, capture_output=True, text=True, env=environment, timeout=120,
        )  # fmt: skip
        record = storage.lookup(stage)
        assert record is not None, ended.stderr
        return record

    recipe = load_recipe(str(home.recipe))
    preprocess = PreprocessStageConfig(data=recipe.data, model=recipe.model)
    data = run("preprocess", preprocess.model_dump(mode="json")).artifact
    counted = run("count", {"count": {"splits": ["rl"]}}, dataset=data)
    assert counted.metrics == {"rl": 64.0}
    assert (storage.local_copy(counted.artifact) / "counts.json").exists()
