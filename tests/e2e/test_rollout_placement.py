"""Whole pipelines whose rollout engines run beside the training rank, in processes of their own."""

import json
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY
from infra.job_environments import interpreter_of

pytestmark = pytest.mark.slow

ON_VLLM = (
    "rollout.engine=vllm", "rollout.placement=disaggregated", "model.architecture.head_dim=32"
)  # fmt: skip


def test_a_pool_of_its_own_yields_the_same_policy_bitwise(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    inside = home.run()
    beside = home.run("rollout.placement=disaggregated")
    first, second = ({s["name"]: s for s in report["stages"]} for report in (inside, beside))
    assert second["rl_round_1"]["reused"] is False
    for name in ("sft", "rl_round_1", "merge"):
        assert first[name]["digest"] == second[name]["digest"], name
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*"))


def test_a_pipeline_whose_answers_come_from_vllm(tmp_path: Path) -> None:
    if interpreter_of("vllm") is None:
        pytest.skip("needs the job environment vllm: make env-vllm")
    home = Home(tmp_path / "run")
    report = home.run(*ON_VLLM)
    assert report["accuracy"]
    worst = [
        record["values"]["mismatch/logprob_abs_max"]
        for file in (home.path / "store" / "work").rglob("*.jsonl")
        for record in map(json.loads, file.read_text().splitlines())
        if "mismatch/logprob_abs_max" in record.get("values", {})
    ]
    assert len(worst) == 2
    assert max(worst) < 1e-4
    # vLLM's known fault: the bytes arrive, their digest is right, and the head is that of before.
    home.environment["RLHF_FAULTS"] = "vllm.head_refresh=nan"
    failed = home.start("run", *settings(*ON_VLLM), "--force", "rl_round_1")
    assert failed.returncode == 1
    assert "probe/version=0/replica=0: after the sync" in failed.stdout + failed.stderr
