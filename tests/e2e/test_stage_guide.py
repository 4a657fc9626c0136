"""The guides to a stage and to a trainer, followed to the letter in a copy of the project."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_pipeline import Home

from engines.config.stages.data import PreprocessStageConfig
from flows.recipe.recipe import Recipe, load_recipe
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")


def insert(path: Path, below: str, text: str) -> None:
    """Add lines below the one line that begins like this."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.strip().startswith(below)]
    lines[place + 1 : place + 1] = text.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def blocks_of(guide: str) -> list[str]:
    """The code of a guide, in its order."""
    text = (GUIDES / guide).read_text()
    return [
        textwrap.dedent(block)
        for block in re.findall(r"^ {3}```python\n(.*?)^ {3}```", text, re.M | re.S)
    ]


class Project:
    """A copy of the project, a home, and jobs of that copy over one store."""

    def __init__(self, root: Path) -> None:
        self.path, self.home = root / "project", Home(root / "home")
        for package in PACKAGES:
            unread = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, self.path / package, ignore=unread)
        self.environment = {**self.home.environment, "PYTHONPATH": str(self.path)}
        self.storage = open_storage(str(root / "store"))

    def add_function(self, code: str, imports: str) -> None:
        """A stage's function, and what it needs."""
        stages = self.path / "tasks/stages.py"
        with stages.open("a") as file:
            file.write(f"\n\n{code}")
        insert(stages, "from infra.store", imports)

    def said(self, command: list[str]) -> str:
        """What a command of the copy prints that has to end well."""
        ended = subprocess.run(
            command,
            cwd=self.path, capture_output=True, text=True, env=self.environment, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def run(self, stage: str, config: dict, **inputs: Artifact) -> CommitRecord:
        """What a stage's job committed."""
        spec = StageSpec(
            stage=stage, job_module=f"engines.jobs.{stage}", fingerprint=stage, attempt=0,
            holder="test", config=config, inputs=inputs, seed=0, store_uri=self.storage.uri,
        )  # fmt: skip
        self.storage.attempts.hold(stage, Holder(id="test", process="test"), 0)
        self.storage.channel(stage).write_specification(spec)
        self.said([sys.executable, *spec.job_argv])
        record = self.storage.lookup(stage)
        assert record is not None
        return record

    def dataset(self, *settings: str) -> tuple[Recipe, Artifact]:
        """The recipe of the home, and its data."""
        recipe = load_recipe(str(self.home.recipe), settings)
        preprocess = PreprocessStageConfig(data=recipe.data, model=recipe.model)
        return recipe, self.run("preprocess", preprocess.model_dump(mode="json")).artifact


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_stage_is_one_file_one_field_and_one_line(project: Project) -> None:
    declaration, job, task, field, line = blocks_of("add-a-stage.md")
    (project.path / "engines/config/stages/count.py").write_text(declaration)
    (project.path / "engines/jobs/count.py").write_text(job)
    imports = "from engines.config.stages.count import CountConfig, CountStageConfig"
    project.add_function(task, imports)
    recipe_file, flow = (project.path / f"flows/{f}.py" for f in ("recipe/recipe", "stage_order"))
    insert(recipe_file, "data: DataConfig", textwrap.indent(field, " " * 4))
    insert(flow, "data = preprocess(", textwrap.indent(line, " " * 4))
    insert(flow, "from infra.errors", f"{imports}\nfrom tasks.stages import count")
    insert(recipe_file, "from pathlib import Path", imports)

    planned = json.loads(project.said(project.home.command("plan", "--json")))
    labels = [stage["label"] for stage in planned["stages"]]
    assert labels[:3] == ["preprocess", "count", "sft"]
    _, data = project.dataset()
    counted = project.run("count", {"count": {"splits": ["rl"]}}, dataset=data)
    assert counted.metrics == {"rl": 64.0}
    assert (project.storage.local_copy(counted.artifact) / "counts.json").exists()


def test_a_trainer_is_a_training_set_a_declaration_and_a_job_of_a_page(project: Project) -> None:
    training_set, declaration, job, task = blocks_of("add-a-trainer.md")
    name = "unlikelihood.py"
    (project.path / "engines/trainers/supervised" / name).write_text(training_set)
    (project.path / "engines/config/stages" / name).write_text(declaration)
    (project.path / "engines/jobs" / name).write_text(job)
    project.add_function(
        task, "from engines.config.stages.unlikelihood import UnlikelihoodStageConfig"
    )
    project.said([sys.executable, "-c", "from tasks.stages import unlikelihood"])

    recipe, data = project.dataset("data.arithmetic.num_preference=32")
    config = recipe.sft_stage().model_dump(mode="json", exclude={"sft"})
    optimizer = {"lr": 1e-2, "schedule": "constant"}
    section = {"num_steps": 8, "batch_size_sequences": 8, "optimizer": optimizer}
    given = {**config, "hardware": {"platform": "cpu"}, "unlikelihood": section}
    trained = project.run("unlikelihood", given, dataset=data)
    assert (trained.artifact.kind, trained.metrics["num_steps"]) == ("policy", 8.0)
    [journal] = Path(project.storage.uri).glob("work/unlikelihood/**/*.jsonl")
    losses = [
        record["values"]["train/loss"]
        for record in map(json.loads, journal.read_text().splitlines())
        if "train/loss" in record.get("values", {})
    ]
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]
