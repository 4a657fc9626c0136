"""`rlhf evaluate`: a model of nobody's making on suites, beside another, and again."""

import json
import re
from pathlib import Path

import pytest
from tiny_pipeline import Home, ran

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer

SHAPE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)
SUITE = "extends: addition\ndata: {arithmetic: {num_eval: 24}}\nevaluation: {num_samples: 2}\n"


def model(directory: Path, seed: int) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["0123456789+= "], directory.with_suffix(".tokenizer"), max_length=64
    )
    create_random_model(SHAPE, tokenizer, 64, seed, directory)
    return directory


@pytest.mark.stacks
def test_two_models_on_a_suite(tmp_path: Path) -> None:
    """The second time nothing runs, and of a model that comes in one's place only that."""
    home = Home(tmp_path / "home")
    first, second, third = (model(tmp_path / f"model{seed}", seed) for seed in range(3))
    suite = tmp_path / "few.yaml"
    suite.write_text(SUITE)

    def evaluate(ours: Path, theirs: Path, *arguments: str) -> str:
        home.recipe = str(ours)
        return home.rlhf("evaluate", "--suite", str(suite), "--against", str(theirs), *arguments)

    printed = evaluate(first, second)
    report = home.report(printed)
    labels = ["preprocess_few", "evaluate_few", "evaluate_few_against", "compare_few"]
    assert ran(report) == labels
    found = {stage["name"]: stage["metrics"] for stage in report["stages"]}
    assert found["evaluate_few"]["num_problems"] == 24
    assert {"gain/accuracy", "margin/pass@1", "gain/reward/mean"} <= found["compare_few"].keys()
    assert re.search(r"^\| compare_few \| accuracy \| [+-]0\.\d{4} \|", printed, re.M)
    assert re.search(r"^\| evaluate_few_against \| 24 \| ", printed, re.M)
    again = json.loads(evaluate(first, second, "--json"))
    assert ran(again) == []
    assert again["stages"][3]["digest"] == report["stages"][3]["digest"]
    assert ran(home.report(evaluate(third, second))) == ["evaluate_few", "compare_few"]
