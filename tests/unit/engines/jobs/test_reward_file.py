"""A reward file runs from the copy that was planned, in respawned scoring processes too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines.config.algorithm import RewardConfig
from engines.jobs.process.policy_stage import local_reward
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.scorer import RewardScorer
from infra.identity.imported_code import script_artifact
from infra.store.storage import LocalStorage

CODE = """
import os
from points import POINTS

def score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        os._exit(1)
    return POINTS
"""


def test_an_edit_in_mid_run_reaches_no_scorer(tmp_path: Path) -> None:
    """Findings I 5: a respawned scorer read the user's file again."""
    script, points = tmp_path / "score.py", tmp_path / "points.py"
    script.write_text(CODE, encoding="utf-8")
    points.write_text("POINTS = 0.25\n", encoding="utf-8")
    inputs = {"reward": script_artifact(script, "rl.reward.function")}
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(inputs=inputs),
        attempt_dir=tmp_path / "attempt-0",
        storage=LocalStorage(tmp_path / "store"),
    )
    config = RewardConfig(function=f"{script}:score", max_unscored_frac=1.0)
    with RewardScorer(local_reward(context, config)) as scorer:
        request = ScoreRequest("s", "right", "right")
        assert scorer.score([request]) == [Score(0.25)]
        points.write_text("POINTS = 0.75\n", encoding="utf-8")
        script.write_text("broken(", encoding="utf-8")
        [crashed] = scorer.score([ScoreRequest("s", "crash", "right")])
        assert isinstance(crashed, Unscored)
        assert scorer.score([request]) == [Score(0.25)]
