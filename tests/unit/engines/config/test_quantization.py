"""`rollout.quantization`: where it is refused, and which models it is not for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.config.rollout import RolloutConfig
from engines.config.stages.final import EvaluateStageConfig, HarnessStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.training import HardwareConfig
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import replica_beside
from flows import machine_survey
from flows import preflight as checks
from flows.preflight import preflight
from flows.recipe.recipe import load_recipe
from flows.stage_order import stages_of
from infra.errors import ConfigError
from infra.plugins import assumed_installed
from infra.survey_report import FoundPlatform

FP8 = ["rollout.quantization=fp8", "rollout.engine=vllm", "rollout.dtype=bfloat16"]
MEASURING = (EvaluateStageConfig, HarnessStageConfig, SelfPlayStageConfig)


@pytest.fixture(autouse=True)
def _environments() -> Iterator[None]:
    with assumed_installed():
        yield


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("rollout.engine=transformers", "got fp8 with rollout.engine transformers; need vllm; set"),
        ("rollout.engine=sglang", "got fp8 with rollout.engine sglang; need vllm; set"),
        ("rollout.dtype=float32", "got fp8 with a model in float32; need bfloat16; set"),
    ],
)
def test_a_recipe_is_refused_before_anything_runs(more: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_recipe("quickstart", [*FP8, more])
    assert refused.value.path == "rollout.quantization"


@pytest.mark.parametrize("changes", [[], ["rollout.dtype=null", "training.dtype=bfloat16"]])
def test_only_rounds_sample_from_a_quantized_model(changes: list[str]) -> None:
    stages = stages_of(load_recipe("quickstart", [*FP8, *changes]))
    rounds = [each for each in stages if isinstance(each, RLRoundStageConfig)]
    measuring = [each for each in stages if isinstance(each, MEASURING)]
    assert rounds
    assert measuring
    assert {each.rollout.quantization for each in rounds} == {"fp8"}
    assert {each.rollout.quantization for each in measuring} == {None}


def test_models_beside_the_policy_are_not_quantized(tmp_path: Path) -> None:
    rollout = RolloutConfig(engine="vllm", dtype="bfloat16", quantization="fp8", silence_s=7.0)
    policy = ReplicaSpec(tmp_path, rollout, "bfloat16", "cpu", None, 1, tmp_path)
    beside = replica_beside(policy, tmp_path, 2, {"enforce_eager": True}, embedded=False)
    assert beside.rollout.quantization is None
    assert beside.rollout.silence_s == 7.0
    assert beside.rollout.options == {"enforce_eager": True}


@pytest.mark.parametrize(
    ("supports_fp8", "dtype", "problem"),
    [
        (True, "bfloat16", None),
        (False, "bfloat16", "need a device that multiplies 8-bit floats"),
        (True, "null", "got fp8 with a model in float32"),  # which training.dtype auto is here
    ],
)
def test_a_device_is_refused_before_a_model_loads(
    supports_fp8: bool,
    dtype: str,
    problem: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for name in ("RAY_ADDRESS", "RLHF_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    found = FoundPlatform(
        name="cpu", device="cpu", reason="here", label="x86", supports_fp8=supports_fp8
    )
    for module in (machine_survey, checks):
        monkeypatch.setattr(module, "surveyed", lambda *_: found)
    asked = load_recipe("quickstart", [*FP8, f"rollout.dtype={dtype}"])
    asked = asked.model_copy(update={"hardware": HardwareConfig(platform="cpu")})
    if problem is None:
        preflight(asked)
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        preflight(asked)
    assert refused.value.path == "rollout.quantization"
