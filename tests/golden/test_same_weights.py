"""The yardstick itself: each kind of thing that a run computes shows when it differs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from same_weights import computed

TENSORS = "artifacts/policy/d/checkpoint/tensors/shard-00000-00000.safetensors"
RANDOM = "artifacts/policy/d/checkpoint/rng/rank-00000.safetensors"
JOURNAL = "work/f/attempt-0/journal.jsonl"


def write_run(
    home: Path, weight: float = 1.0, moment: float = 1.0, state: int = 1, loss: float = 0.5,
    evaluation: str = "e", **measured: float,
) -> Path:  # fmt: skip
    """A store of one trained policy and its evaluation."""
    store = home / "store"
    for name in ("stages/f", "stages/g", "work/f/attempt-0"):
        (store / name).mkdir(parents=True)
    for name, tensors in {
        TENSORS: {"model.w": torch.tensor(weight), "optimizer.exp_avg.w": torch.tensor(moment)},
        RANDOM: {"cpu": torch.tensor(state, dtype=torch.uint8)},
    }.items():
        (store / name).parent.mkdir(parents=True)
        save_file(tensors, store / name)
    values = {"actor/pg_loss": loss, **measured}
    (store / JOURNAL).write_text(json.dumps({"kind": "metrics", "step": 1, "values": values}))
    for number, (key, stage, kind, digest) in enumerate(
        [("f", "rl_round", "policy", "d"), ("g", "evaluate", "evaluation", evaluation)]
    ):
        record = {"stage": stage, "fingerprint": key, "artifact": {"kind": kind, "digest": digest}}
        entry = {"kind": "committed", "made_at": str(number), "record": record}
        (store / "stages" / key / "1").write_text(json.dumps(entry))
    return home


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"weight": 2.0}, ["rl_round 1: policy weights"]),
        ({"moment": 2.0}, ["rl_round 1: policy moments"]),
        ({"state": 2}, ["rl_round 1: random state"]),
        ({"loss": 0.25}, ["rl_round 1: metric actor/pg_loss"]),
        ({"evaluation": "h"}, ["evaluate 1: evaluation"]),
        ({"timing_s/step": 3.0, "actor/new": 1.0}, []),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: dict, named: list[str]) -> None:
    before = computed(write_run(tmp_path / "before"))
    after = computed(write_run(tmp_path / "after", **change))
    assert before.differences(after) == named


def test_equal_nans_are_equal(tmp_path: Path) -> None:
    runs = [computed(write_run(tmp_path / name, loss=float("nan"))) for name in ("a", "b")]
    assert runs[0].differences(runs[1]) == []
