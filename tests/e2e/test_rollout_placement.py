"""Whole pipelines whose rollout engines run beside the training rank, in processes of their own."""

from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY
from infra.job_environments import interpreter_of

STALE = {"sglang": "sglang.embedding=nan", "vllm": "vllm.head_refresh=nan"}
"""What keeps old weights in an engine whose every call says that all is well: vLLM's known fault,
the output head of before, and what SGLang does with a name that it does not know, nothing."""


def on(engine: str, placement: str) -> tuple[str, ...]:
    return (
        f"rollout.engine={engine}",
        f"rollout.placement={placement}",
        "model.architecture.head_dim=32",
    )


@pytest.mark.stacks
def test_a_pool_of_its_own_yields_the_same_policy_bitwise(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    learns = "rl.algorithm.entropy_coeff=-0.05"  # rewards of so small a model are all equal
    inside = home.run(learns)
    beside = home.run(learns, "rollout.placement=disaggregated")
    first, second = ({s["name"]: s for s in report["stages"]} for report in (inside, beside))
    assert second["rl_round_1"]["reused"] is False
    for name in ("sft", "rl_round_1", "merge"):
        assert first[name]["digest"] == second[name]["digest"], name
    assert min(home.values("actor/grad_norm")) > 0
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "placement"),
    [("sglang", "disaggregated"), ("vllm", "disaggregated"), ("vllm", "colocated")],
)
def test_a_pipeline_whose_answers_come_from_another_environment(
    tmp_path: Path, engine: str, placement: str
) -> None:
    if interpreter_of(engine) is None:
        pytest.skip(f"needs the job environment {engine}: make env-{engine}")
    home = Home(tmp_path / "run")
    report = home.run(*on(engine, placement))
    assert report["accuracy"]
    worst = home.values("mismatch/logprob_abs_max")
    assert len(worst) == 2
    assert max(worst) < 1e-4
    home.environment["RLHF_FAULTS"] = STALE[engine]  # the bytes arrive, their digest is right
    failed = home.start("run", *settings(*on(engine, placement)), "--force", "rl_round_1")
    assert failed.returncode == 1
    assert "probe/version=0/replica=0: after the sync" in failed.stdout + failed.stderr


@pytest.mark.slow
def test_an_adapter_reaches_vllm_alone(tmp_path: Path) -> None:
    """Round by round on weights of their own, which the adapters of the rounds before are in."""
    if interpreter_of("vllm") is None:
        pytest.skip("needs the job environment vllm: make env-vllm")
    home = Home(tmp_path / "run")
    learns = ("rl.algorithm.entropy_coeff=-0.05", "training.lora={rank: 4}", "rl.num_rounds=2")
    home.run(*on("vllm", "disaggregated"), *learns, "rollout.lora_sync=adapter")
    # Of each layer: q, o (32 -> 128 and back), k, v (32 -> 64), gate, up, down (32 -> 64 and back).
    num_values = 2 * 4 * (2 * (32 + 128) + 2 * (32 + 64) + 3 * (32 + 64))
    assert home.values("rollout/sync_bytes") == [4 * num_values] * 4
    assert max(home.values("mismatch/logprob_abs_max")) < 1e-4
    assert min(home.values("actor/grad_norm")) > 0
