"""Preference training on the policy's own answers: against the data's, and by reward."""

from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from engines.data.read.row_files import PREFERENCE_FORMAT, SFT_FORMAT, RowFile

TRAINING = "num_steps: 2, batch_size_pairs: 8, optimizer: {lr: 1.0e-3}"
SPIN = (
    f"preference={{{TRAINING}, self_play: {{num_iterations: 2, num_prompts: 32}}}}",
    "sft.num_steps=40",  # it has to end an answer now and then
    "rl.num_rounds=0",
)
ITERATIONS = [
    f"{name}_{iteration}"
    for iteration in (1, 2)
    for name in ("self_play", "preference", "evaluate_preference")
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("self-play") / "run")


def artifacts(report: dict, kind: str, home: Home) -> list[Path]:
    """Of the stages of a run that yield such, in order."""
    root = home.path / "store" / "artifacts" / kind
    found = [root / stage["digest"] for stage in report["stages"]]
    return [path for path in found if path.exists()]


@pytest.mark.stacks
def test_the_policy_plays_against_the_data(home: Home) -> None:
    report = home.run(*SPIN)
    names = [stage["name"] for stage in report["stages"]]
    assert names[3 : 3 + len(ITERATIONS)] == ITERATIONS
    [data] = artifacts(report, "dataset", home)
    right = {
        row.prompt: row.messages[-1].content for row in RowFile(data / "sft.parquet", SFT_FORMAT)
    }
    first, second = (
        tuple(RowFile(path / "preference.parquet", PREFERENCE_FORMAT))
        for path in artifacts(report, "pairs", home)
    )
    for pairs in (first, second):
        assert 0 < len(pairs) <= 32
        assert all(pair.chosen == right[pair.prompt] != pair.rejected for pair in pairs)
    assert not {pair.prompt for pair in first} & {pair.prompt for pair in second}
    policies = artifacts(report, "policy", home)
    assert len({path.name for path in policies}) == 3
    assert "  submitted" not in home.rlhf("run", *settings(*SPIN))


@pytest.mark.stacks
def test_pairs_by_reward_have_a_better_answer(home: Home) -> None:
    by_reward = (
        f"preference={{{TRAINING}, self_play: {{source: best_worst, num_iterations: 1, "
        "num_prompts: 16, num_samples: 4}}",
        *SPIN[1:],
        "rl.reward={function: length, kwargs: {free_tokens: 1, max_tokens: 6}}",
    )
    report = home.run(*by_reward)
    [made] = artifacts(report, "pairs", home)
    pairs = tuple(RowFile(made / "preference.parquet", PREFERENCE_FORMAT))
    assert pairs
    assert all(pair.margin is not None and pair.margin > 0 for pair in pairs)
