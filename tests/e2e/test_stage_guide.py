"""The guides to a stage and to a trainer, followed to the letter in a copy of the project."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import Recipe, load_recipe
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")


def guide_text(guide: str) -> str:
    return (GUIDES / guide).read_text(encoding="utf-8")


def blocks_of(guide: str) -> list[str]:
    """The code of a guide, in its order."""
    found = re.findall(r"^ {3}```python\n(.*?)^ {3}```", guide_text(guide), re.M | re.S)
    return [textwrap.dedent(block) for block in found]


class Project:
    """A copy of the project, a home, and jobs of that copy over one store."""

    def __init__(self, root: Path) -> None:
        self.path, self.home = root / "project", Home(root / "home")
        for package in PACKAGES:
            unread = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, self.path / package, ignore=unread)
        self.environment = {**self.home.environment, "PYTHONPATH": str(self.path)}
        self.storage = open_storage(str(root / "store"))

    def write(self, file: str, code: str) -> None:
        """A file that is not there yet."""
        path = self.path / file
        assert not path.exists()
        path.write_text(code, encoding="utf-8")

    def add(self, file: str, code: str, above: str = "") -> None:
        """Code above the one line that begins like this, or at the end, and its imports on top."""
        path = self.path / file
        lines, added = path.read_text(encoding="utf-8").splitlines(), code.splitlines()
        imports = list(itertools.takewhile(lambda line: line.startswith("from "), added))
        if above:
            body = "\n".join(added[len(imports) :]).strip()
            (place,) = [n for n, line in enumerate(lines) if line.strip().startswith(above)]
            indent = lines[place][: -len(lines[place].lstrip())]
            lines[place:place] = textwrap.indent(body, indent).splitlines()
        else:
            lines += added[len(imports) :]
        first = next(
            number
            for number, line in enumerate(lines)
            if line.startswith(("import ", "from ")) and "__future__" not in line
        )
        lines[first:first] = imports
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def in_guide(self, guide: str, *files: str) -> None:
        """That the guide names each file, and each line that something goes above."""
        text = " ".join(guide_text(guide).split())
        assert [name for name in files if name and f"`{name}" not in text] == []

    def ended(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A command of the copy, however it ends."""
        return subprocess.run(
            command,
            cwd=self.path, capture_output=True, text=True, env=self.environment, timeout=120,
        )  # fmt: skip

    def said(self, command: list[str]) -> str:
        """What a command of the copy prints that has to end well."""
        ended = self.ended(command)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def planned(self, *overrides: str) -> list[str]:
        """The stages that a plan tells."""
        plan = self.said(self.home.command("plan", "--json", *settings(*overrides)))
        return [stage["label"] for stage in json.loads(plan)["stages"]]

    def refused(self, *overrides: str) -> str:
        """The one line by which a plan refuses a recipe."""
        ended = self.ended(self.home.command("plan", *settings(*overrides)))
        assert ended.returncode == 2, ended.stdout + ended.stderr
        return (ended.stdout + ended.stderr).strip()

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


def add_a_stage(project: Project) -> None:
    """Every block of the guide, where it says."""
    declaration, job, line = blocks_of("add-a-stage.md")
    for number, (file, code, above) in enumerate(
        [
            ("engines/config/stages/count.py", declaration, ""),
            ("engines/jobs/count.py", job, ""),
            ("flows/stage_order.py", line, "if data is None or not recipe.trains:"),
        ]
    ):
        project.in_guide("add-a-stage.md", file, above)
        if number < 2:
            project.write(file, code)
        else:
            project.add(file, code, above)


def add_a_trainer(project: Project) -> None:
    """Every block of the guide, where it says."""
    training_set, declaration, job, *rest = blocks_of("add-a-trainer.md")
    [lines] = rest
    for file, code in [
        ("engines/trainers/supervised/unlikelihood.py", training_set),
        ("engines/config/stages/unlikelihood.py", declaration),
        ("engines/jobs/unlikelihood.py", job),
    ]:
        project.in_guide("add-a-trainer.md", file)
        project.write(file, code)
    file, above = "flows/stage_order.py", "reference = _newest(policies)"
    project.in_guide("add-a-trainer.md", file, above)
    project.add(file, lines, above)


def test_a_stage_is_one_file_and_one_line(project: Project) -> None:
    add_a_stage(project)
    assert project.planned()[:3] == ["preprocess", "count", "sft"]
    assert project.planned("stages.count.splits=[rl]")[:3] == ["preprocess", "count", "sft"]
    assert "stages.count.splits.0" in project.refused("stages.count.splits=[nothing]")
    assert "stages.cuont: no stage of this run reads it; need count" in project.refused(
        "stages.cuont.splits=[rl]"
    )

    _, data = project.dataset()
    counted = project.run("count", {"count": {"splits": ["rl"]}}, dataset=data)
    assert counted.metrics == {"rl": 64.0}
    assert (project.storage.local_copy(counted.artifact) / "counts.json").exists()


def test_both_guides_together_leave_a_tree_that_keeps_its_rules(project: Project) -> None:
    add_a_stage(project)
    add_a_trainer(project)
    rules = Path("tests/unit/test_tree_rules.py")
    (project.path / rules).parent.mkdir(parents=True)
    for file in (rules, Path("pyproject.toml")):
        shutil.copy(ROOT / file, project.path / file)
    project.said([sys.executable, "-m", "ruff", "check", "--fix", *PACKAGES])  # as `make format`
    project.said(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(rules)]
    )


def test_a_plan_refuses_what_a_trainer_could_not_train(project: Project) -> None:
    add_a_trainer(project)
    example = re.search(
        r"^```yaml\nstages:\n  unlikelihood: (.*)\n```", guide_text("add-a-trainer.md"), re.M
    )
    assert example is not None
    on, pairs = f"stages.unlikelihood={example[1]}", "data.arithmetic.num_preference=32"
    assert project.planned()[:3] == ["preprocess", "sft", "evaluate_sft"]
    trained = ["unlikelihood", "evaluate_unlikelihood"]
    assert project.planned(on, pairs)[3:5] == trained
    assert project.planned(on, pairs, "sft=null")[1:3] == trained
    two = "training.num_workers=2"
    assert project.planned(on, pairs, two)[3:5] == trained
    size = "stages.unlikelihood.batch_size_sequences"
    assert project.refused(on, pairs, two, f"{size}=3").endswith(
        f"{size}: 3 is not a multiple of the 2 data-parallel ranks; use 2 or 4"
    )
    assert "data.arithmetic.num_preference: got 0" in project.refused(on)


def test_trainer_from_the_guide_runs_and_lowers_its_loss(project: Project) -> None:
    add_a_trainer(project)
    recipe, data = project.dataset("data.arithmetic.num_preference=32")
    config = SFTStageConfig.from_recipe(recipe).model_dump(mode="json", exclude={"sft"})
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
