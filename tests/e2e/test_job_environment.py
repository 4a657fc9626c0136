"""A pipeline whose training stages run in a job environment of their own, with two ranks."""

import json
from pathlib import Path

import pytest
from tiny_pipeline import Home

from infra.job_environments import interpreter_of

pytestmark = pytest.mark.slow


def test_a_pipeline_in_the_environment_of_veomni(tmp_path: Path) -> None:
    if interpreter_of("veomni") is None:
        pytest.skip("needs the job environment veomni: make env-veomni")
    home = Home(tmp_path / "run")
    report = home.run("training.backend=veomni", "training.num_workers=2")
    assert [stage["name"] for stage in report["stages"]][1:4:2] == ["sft", "rl_round_1"]
    policies = list((home.path / "store").rglob("engine.json"))
    scalars = [json.loads(file.read_text()) for file in policies]
    assert {(one["backend"], one["world_size"]) for one in scalars} == {("veomni", 2)}
    assert len(policies) == 2
    specs = [json.loads(file.read_text()) for file in (home.path / "store/work").rglob("spec.json")]
    assert {spec["stage"] for spec in specs} >= {"sft", "rl_round", "merge", "evaluate"}
