"""Nights of tiny recipes on the command line: afresh each time, and a verdict that says where."""

import shutil
import sqlite3
from pathlib import Path

import pytest
import yaml
from tiny_pipeline import RECIPE, Home

from flows.nightly.night import Night, last_night, nights_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "flows", "hardware", "infra", "tasks")
EDITED = "engines/algorithms/policy_objective.py"
ENTROPY = "return self.algorithm.entropy_coeff * entropy"
STAGES = {
    "supervised": ["preprocess", "sft", "evaluate_sft", "merge", "evaluate", "promote"],
    "reinforced": [
        *("preprocess", "rl_round_1", "evaluate_rl_round_1", "merge", "evaluate", "promote"),
    ],
}


class Nights:
    """Nights of some recipes in a home of their own, with the sources of a tree of their own."""

    def __init__(self, path: Path, *names: str) -> None:
        self.home = Home(path / "place")
        self._recipes = [path / f"{name}.yaml" for name in names]
        self._baselines = path / "baselines"
        self.tree = path / "tree"
        for package in PACKAGES:
            shutil.copytree(ROOT / package, self.tree / package)
        self.home.environment |= {"PYTHONPATH": str(self.tree), "PYTHONSAFEPATH": "1"}
        for name in names:
            self.write(name)

    def write(self, name: str, sft_lr: float = 0.001) -> None:
        """Write a recipe that ends after SFT (`supervised`), or one that begins with RL."""
        recipe = yaml.safe_load(RECIPE) | {"name": name}
        recipe["sft"]["optimizer"]["lr"] = sft_lr
        recipe["rl"]["algorithm"] = {"entropy_coeff": 0.01}
        if name == "supervised":
            recipe["rl"]["num_rounds"] = 0
        if name == "reinforced":
            recipe["sft"] = None
        path = next(path for path in self._recipes if path.stem == name)
        path.write_text(yaml.safe_dump(recipe))

    def run(self, *options: str, code: int = 0) -> Night:
        """What the last night found after a command that ends with this code."""
        self.home.recipe, *others = self._recipes
        words = [*map(str, others), "--baselines", str(self._baselines), *options]
        ended = self.home.start("nightly", *words)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return last_night(self.home.path)

    def jobs(self, night: Night) -> dict[str, int]:
        """How many stages had a job in each recipe's store of that night."""
        stores = nights_of(self.home.path) / night.name / "stores"
        return {each.name: len([*each.glob("work/*")]) for each in stores.iterdir()}


def all_stages(*names: str) -> dict[str, int]:
    return {name: len(STAGES[name]) for name in names}


@pytest.mark.stacks
def test_a_night_computes_afresh_and_names_the_stage_that_fails(tmp_path: Path) -> None:
    nights = Nights(tmp_path, "supervised")
    first = nights.run()
    assert nights.jobs(first) == all_stages("supervised")
    [outcome] = first.outcomes
    assert outcome.verdict.word == "drift", "nothing is stored yet"
    assert [*outcome.measurement.stages] == STAGES["supervised"]
    assert len(outcome.measurement.runs[0].stages["sft"].curve) == 4
    assert nights.run("--accept") == first

    nights.write("supervised", sft_lr=0.01)
    second = nights.run(code=1)
    assert second.name != first.name
    assert nights.jobs(second) == all_stages("supervised"), "afresh"
    [outcome] = second.outcomes
    assert (outcome.verdict.word, outcome.verdict.stage) == ("fail", "sft")
    assert outcome.verdict.causes == ("settings: sft.optimizer.lr 0.001 -> 0.01",)
    # Data does not depend on the learning rate, so a store of both nights would have reused it.
    digests = [each.outcomes[0].measurement.stages["preprocess"].digest for each in (first, second)]
    assert digests[0] == digests[1]
    assert not (nights.home.path / "store").exists()
    assert not (nights.home.path / "mlflow.db").exists()
    page = (nights_of(nights.home.path) / second.name / "night.md").read_text()
    assert "| supervised | 🔴 fail | sft |" in page
    database = sqlite3.connect(nights.home.path / "prefect" / "prefect.db")
    events = database.execute("SELECT event FROM events WHERE event LIKE 'rlhf.nightly.%'")
    assert {event for (event,) in events} == {"rlhf.nightly.drifted", "rlhf.nightly.failed"}
    pages = database.execute("SELECT data FROM artifact WHERE key = 'nightly'").fetchall()
    assert len(pages) == 2
    assert "data:image/svg+xml;base64," in pages[1][0]


@pytest.mark.stacks
def test_two_recipes_night_after_night(tmp_path: Path) -> None:
    names = ("supervised", "reinforced")
    nights = Nights(tmp_path, *names)
    first = nights.run()
    assert nights.jobs(first) == all_stages(*names)
    nights.run("--accept")
    seen = {first.name}
    for _ in range(2):
        again = nights.run()
        assert again.name not in seen
        seen.add(again.name)
        assert nights.jobs(again) == all_stages(*names)
        assert [each.verdict.word for each in again.outcomes] == ["pass", "pass"]

    nights.write("supervised", sft_lr=0.01)
    source = nights.tree / EDITED
    assert ENTROPY in source.read_text()
    source.write_text(source.read_text().replace(ENTROPY, f"{ENTROPY} * 1.01"))
    last = nights.run(code=1)
    assert nights.jobs(last) == all_stages(*names)
    supervised, reinforced = (each.verdict for each in last.outcomes)
    assert (supervised.word, supervised.stage) == ("fail", "sft")
    assert (reinforced.word, reinforced.stage) == ("drift", "rl_round_1")
    assert reinforced.causes == (f"sources: {EDITED}",)
