"""A reward is called once before anything trains."""

from pathlib import Path

import pytest

from engines.config.algorithm import RewardConfig
from engines.jobs.preflight.run import look_at_reward
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("solution, answer", "solution"),
        ("data_source, solution_str, ground_truth", "extra_info"),
        ("judge, **_", "judge"),
    ],
)
def test_reward_with_wrong_signature_is_refused_without_a_row(
    tmp_path: Path, signature: str, said: str
) -> None:
    """Findings VIII 1: where the data is the hub's, there is no row to try it on."""
    (tmp_path / "score.py").write_text(f"def score({signature}):\n    return 1.0\n")
    reward = RewardConfig(function=f"{tmp_path}/score.py:score")
    with pytest.raises(ConfigError, match=f"raised TypeError: .*{said}.*called with") as told:
        look_at_reward(reward, None)
    assert "\n" not in str(told.value)
