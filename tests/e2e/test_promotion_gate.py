"""The gate in front of the registry over whole pipelines: who becomes champion, who does not."""

import json
from pathlib import Path

import pytest
from tiny_pipeline import Home, ran, settings

GATE = (
    "rl.num_rounds=0",
    "promote={model_name: tiny, metric: reward/mean, min_value: 0.1}",
)
REWARD = '''"""How near an answer comes to the length of the right one."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / (1 + abs(len(solution_str) - len(ground_truth)))
'''
STAGES = ["preprocess", "sft", "evaluate_sft", "merge", "evaluate", "promote"]


def digest(report: dict, name: str) -> str:
    [found] = [stage["digest"] for stage in report["stages"] if stage["name"] == name]
    return found


class Gate:
    """A home whose models are scored by the length of their answers."""

    def __init__(self, directory: Path) -> None:
        (directory / "length.py").write_text(REWARD)
        self.home = Home(directory / "run")
        self.reward = f"rl.reward.function={directory / 'length.py'}:compute_score"

    def words(self, *overrides: str) -> list[str]:
        return settings(*GATE, self.reward, *overrides)

    def run(self, *overrides: str) -> tuple[dict, dict]:
        """The report, and the decision that it ends with."""
        report = self.home.report(self.home.rlhf("run", *self.words(*overrides)))
        artifact = self.home.path / "store/artifacts/promotion" / digest(report, "promote")
        return report, json.loads((artifact / "decision.json").read_text())

    def plan(self, *overrides: str) -> dict[str, str]:
        """How each stage stands."""
        planned = json.loads(self.home.rlhf("plan", "--json", *self.words(*overrides)))
        return {stage["label"]: stage["status"] for stage in planned["stages"]}

    def aliases(self) -> dict[str, str]:
        """The digest of the version that each alias points to."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.home.path / 'mlflow.db'}")
        return {
            alias: client.get_model_version("tiny", version).tags["rlhf.digest"]
            for alias, version in client.get_registered_model("tiny").aliases.items()
        }


@pytest.mark.stacks
def test_a_champion_is_beaten_only_by_a_better_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    first, decision = gate.run()
    assert ran(first) == STAGES
    assert decision["promoted"]
    assert decision["reason"].endswith("need >= 0.1; there is no incumbent")
    assert gate.aliases() == {"champion": digest(first, "merge")}

    worse = ("sft.num_steps=1",)
    assert gate.plan(*worse)["evaluate_incumbent"] == "hit", "it was evaluated by its own run"
    second, decision = gate.run(*worse)
    assert ran(second) == STAGES[1:]
    assert not decision["promoted"]
    assert (
        f"over the incumbent {digest(first, 'merge')[:12]} on 16 problems, not beyond"
        in (decision["reason"])
    )
    champion, challenger = digest(first, "merge"), digest(second, "merge")
    assert gate.aliases() == {"champion": champion, "challenger": challenger}

    better = ("sft.num_steps=150", "evaluation.num_problems=15")
    third, decision = gate.run(*better)
    assert ran(third) == [*STAGES[1:5], "evaluate_incumbent", "promote"]
    comparison = decision["comparison"]
    assert decision["promoted"], decision
    assert comparison["incumbent_digest"] == champion
    assert comparison["gain"] > comparison["margin"] > 0
    assert comparison["gain"] == pytest.approx(decision["value"] - comparison["value"])
    moved = {"champion": digest(third, "merge"), "challenger": challenger}
    assert gate.aliases() == moved

    again, decided = gate.run(*better)
    assert (again, decided) == (third, decision), "nothing runs, and the report of the work stays"
    assert gate.aliases() == moved
    assert set(gate.plan(*better).values()) == {"hit"}

    gate.home.environment["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    ended = gate.home.start("run", *gate.words(*better))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "does not say which version of tiny is champion" in ended.stdout
    assert "nothing is promoted: run the recipe again once it answers" in ended.stdout
    assert gate.home.report(ended.stdout)["promoted"] is False
