"""A pipeline whose model and data are on a hub that moves while the pipeline runs."""

import json
from pathlib import Path

import pytest
from loopback_hub import serve_hub
from tiny_pipeline import Home, settings

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer

ARCHITECTURE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)
USE_HUB = settings(
    "model={init: pretrained, path: owner/model}",
    "data={sft: [{format: messages, path: owner/data, split: sft}],"
    " rl: [{path: owner/data, split: rl}], evaluation: [{path: owner/data, split: test}]}",
    "data.arithmetic=null",
)


def model(directory: Path, seed: int) -> Path:
    """Another vocabulary and other weights for each seed."""
    texts = ["0123456789+= " + "abcdef"[: seed + 1]]
    tokenizer = train_tokenizer(TokenizerConfig(), texts, directory / f"t{seed}", max_length=64)
    create_random_model(ARCHITECTURE, tokenizer, 64, seed, directory / f"m{seed}")
    return directory / f"m{seed}"


def data(directory: Path, term: int) -> Path:
    """Other problems for each term."""
    root = directory / f"d{term}"
    root.mkdir()
    for place, split in enumerate(("sft", "rl", "test")):
        rows = []
        for other in range(20 * place, 20 * place + 16):
            user = {"role": "user", "content": f"{term}+{other}="}
            answer = str(term + other)
            rows.append(
                {"messages": [user, {"role": "assistant", "content": answer}]}
                if split == "sft"
                else {
                    "data_source": "sums",
                    "prompt": [user],
                    "reward_model": {"style": "rule", "ground_truth": answer},
                }
            )
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (root / f"{split}.jsonl").write_text(text)
    return root


@pytest.mark.stacks
def test_every_stage_sees_the_commit_of_the_plan(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    with serve_hub() as hub:
        home.environment["HF_ENDPOINT"] = hub.address
        home.environment["HF_HOME"] = str(tmp_path / "cache")
        refused = home.start("plan", *USE_HUB)
        assert refused.returncode == 2
        assert refused.stderr.startswith("data.sft.0.path: owner/data is no path here")
        assert refused.stderr.count("\n") == 1
        planned = {
            "models/owner/model": [
                hub.push("models/owner/model", model(tmp_path, s)) for s in (0, 1)
            ],
            "datasets/owner/data": [
                hub.push("datasets/owner/data", data(tmp_path, s)) for s in (0, 1)
            ],
        }
        hub.asked.clear()
        hub.moves = True  # with each answer, so before each job
        home.rlhf("run", *USE_HUB)
    resolved = [repository for kind, repository, _ in hub.asked if kind == "info"]
    assert sorted(resolved) == sorted(planned)
    fetched = {(repository, commit) for kind, repository, commit in hub.asked if kind != "info"}
    assert fetched == {(repository, commits[0]) for repository, commits in planned.items()}
